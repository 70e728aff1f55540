"""The library's kernel for softmax on the CPU, to be inherited by kernels of tests, and its identity."""

import dataclasses

import isograd as ig
from isograd.backends.numba import BACKEND
from isograd.ops.softmax.operation import SOFTMAX

KERNEL = BACKEND.kernel(SOFTMAX, "isograd.ops.softmax.numba")


def sku(descriptor, backend, arch):
    return dataclasses.replace(KERNEL.sku(descriptor), op=descriptor.operation, backend=backend, arch=arch)


class NumbaSoftmax(ig.Kernel):
    name = backend = "numba"

    def sku(self, descriptor):
        return KERNEL.sku(descriptor)

    def launch(self, descriptor, arguments, workspace, stream):
        KERNEL.launch(descriptor, arguments, workspace, stream)
