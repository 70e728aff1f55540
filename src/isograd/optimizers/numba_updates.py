# mypy: ignore-errors
"""The updates on the CPU, over chunks of many tensors."""

import numpy as np

from isograd.numerics.numba_memory import load, load_block, pointer, stack_block, store, store_block
from isograd.optimizers.chunks import COLUMNS, COUNT
from isograd.optimizers.numbers import ADAM, COUPLED, DECOUPLED, NUMBERS, SGD
from isograd.runtime.numba_compile import device_function, kernel

LENGTH = 1 << 14  # elements of a chunk
_BLOCK = 1024  # elements that are worked on at a time: four blocks stay in the first-level cache
_NUMBERS = len(NUMBERS)


@device_function
def _adam(p, g, m, v, count, of, at):
    lr, keep_1, take_1, keep_2 = load(of, at + 1), load(of, at + 2), load(of, at + 3), load(of, at + 4)
    take_2, rest_1, rest_2, eps = load(of, at + 5), load(of, at + 6), load(of, at + 7), load(of, at + 8)
    for i in range(count):
        x = load(g, i)
        a = load(m, i) * keep_1 + take_1 * x
        b = load(v, i) * keep_2 + take_2 * (x * x)
        store(m, i, a)
        store(v, i, b)
        store(p, i, load(p, i) - lr * (a / rest_1) / (np.sqrt(b / rest_2) + eps))


@device_function
def _sgd(p, g, b, count, of, at, momentum, first, nesterov):
    lr, keep, take = load(of, at + 1), load(of, at + 2), load(of, at + 3)
    if momentum:
        for i in range(count):
            store(b, i, load(g, i) if first else keep * load(b, i) + take * load(g, i))
        for i in range(count):
            store(g, i, load(g, i) + keep * load(b, i) if nesterov else load(b, i))
    for i in range(count):
        store(p, i, load(p, i) - lr * load(g, i))


@device_function
def _lion(p, g, m, count, of, at):
    lr, keep_1, take_1 = load(of, at + 1), load(of, at + 2), load(of, at + 3)
    keep_2, take_2 = load(of, at + 4), load(of, at + 5)
    for i in range(count):
        a, x = load(m, i), load(g, i)
        c = a * keep_1 + take_1 * x
        store(m, i, a * keep_2 + take_2 * x)
        # A zero leaves the parameter as it is, a NaN does not hide.
        store(p, i, load(p, i) - (lr if c > 0 else (-lr if c < 0 else c - c)))


@kernel
def update_chunks(
    like_p, like_g, like_copy, zero, table_address, numbers_address, chunks_address, rule, decay, momentum, first,
    nesterov, maximize, copied, start, stop,
):  # fmt: skip
    """Update the tensors of a table in place; copied: the parameter is stored in the type of `like_copy` as well."""
    table, places = pointer(table_address, np.int64(0)), pointer(chunks_address, np.int64(0))
    of = pointer(numbers_address, zero)
    p, g, m, v = stack_block(zero), stack_block(zero), stack_block(zero), stack_block(zero)
    for chunk in range(start, stop):
        tensor = load(places, 2 * chunk)
        row, at = tensor * COLUMNS, tensor * _NUMBERS
        factor = load(of, at)
        weights, grads = pointer(load(table, row), like_p), pointer(load(table, row + 1), like_g)
        first_state, second_state = pointer(load(table, row + 2), zero), pointer(load(table, row + 3), zero)
        copies = pointer(load(table, row + 4), like_copy)
        begin = load(places, 2 * chunk + 1) * LENGTH
        end = min(begin + LENGTH, load(table, row + COUNT))
        for j in range(begin, end, _BLOCK):
            count = min(end - j, _BLOCK)
            load_block(weights, j, 1, count, p)
            load_block(grads, j, 1, count, g)
            if maximize:
                for i in range(count):
                    store(g, i, -load(g, i))
            if decay == COUPLED:
                for i in range(count):
                    store(g, i, load(g, i) + factor * load(p, i))
            elif decay == DECOUPLED:
                for i in range(count):
                    store(p, i, load(p, i) * factor)
            if rule == ADAM:
                load_block(first_state, j, 1, count, m)
                load_block(second_state, j, 1, count, v)
                _adam(p, g, m, v, count, of, at)
                store_block(first_state, j, 1, count, m)
                store_block(second_state, j, 1, count, v)
            elif rule == SGD:
                if momentum and not first:
                    load_block(first_state, j, 1, count, m)
                _sgd(p, g, m, count, of, at, momentum, first, nesterov)
                if momentum:
                    store_block(first_state, j, 1, count, m)
            else:
                load_block(first_state, j, 1, count, m)
                _lion(p, g, m, count, of, at)
                store_block(first_state, j, 1, count, m)
            store_block(weights, j, 1, count, p)
            if copied:
                store_block(copies, j, 1, count, p)
