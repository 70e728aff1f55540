"""What several tests of isograd.torch share."""

import sys

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Torch with one thread: more wait for each other in products of a few elements, for seconds on a busy machine."""
    torch = sys.modules["torch"]  # which the tests that ask for this have imported
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
