"""Indices that another thread changes while a call uses them: an error or a result, and never memory of others."""

import pytest

# Another thread is played by `for_ranges`, which every compiled loop over rows goes through: before the loop with a
# given number all indices change. Fresh interpreters, since a kernel that follows such an index ends its process.
CODE = """
    import numpy as np
    import isograd as ig
    from isograd.runtime import parallel

    rng = np.random.default_rng(0)
    launch = parallel.for_ranges

    def changed(number, call, given):
        loops, index = 0, given.copy()

        def for_ranges(*arguments):
            nonlocal loops
            if loops == number:
                index[...] = {value}
            loops += 1
            launch(*arguments)

        parallel.for_ranges = for_ranges
        try:
            result = call(index)
            return loops, result
        except ig.IndexOutOfRangeError as error:
            return loops, str(error)
        finally:
            parallel.for_ranges = launch

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    wide, narrow, row = normal(50, 16), normal(50, 2), normal(1, 300)
    some, one, all_rows, line = (rng.integers(0, 16, (50, 3)), rng.integers(0, 50, 40), rng.permutation(50),
                                 rng.integers(0, 300, (1, 40)))
    distinct = np.stack([rng.permutation(16)[:3] for _ in range(50)])
    routed = normal(50, 3)
    calls = dict(
        take_along_axis=(lambda i: ig.take_along_axis(wide, i), some),
        take_one_row=(lambda i: ig.take_along_axis(row, i), line),
        take_strided=(lambda i: ig.take_along_axis(wide[:, ::2], i[::-1]), some // 2),
        take_along_columns=(lambda i: ig.take_along_axis(wide, i[:, :1], 0), some),
        embedding=(lambda i: ig.embedding(wide, i), one),
        embedding_of_one=(lambda i: ig.embedding(wide[:, :1], i), one),
        backward=(lambda i: ig.take_along_axis_backward(normal(50, 3), i, (50, 16)), some),
        backward_unique=(
            lambda i: ig.take_along_axis_backward(normal(50, 3), i, (50, 16), unique_indices=True), distinct
        ),
        backward_few=(lambda i: ig.take_along_axis_backward(normal(50, 3), i, (50, 1600)), some),
        scatter_sum=(lambda i: ig.scatter_sum(wide, i, normal(50, 3)), some),
        scatter_rows=(lambda i: ig.scatter_sum(wide, i, normal(40, 16), 0), one),
        embedding_backward=(lambda i: ig.embedding_backward(normal(40, 16), i, 50, 7), one),
        embedding_backward_narrow=(lambda i: ig.embedding_backward(normal(40, 2), i, 50, 7), one),
        segment_sum=(lambda i: ig.segment_sum(wide, i, 50), all_rows),
        moe_router_backward=(lambda i: ig.moe_router_backward(routed, wide, i), distinct),
        expert_counts=(lambda i: ig.expert_counts(i, 16), some),
        expert_permutation=(lambda i: ig.expert_permutation(i, 16), some),
        load_balancing_loss=(lambda i: ig.load_balancing_loss(wide, i), some),
        cross_entropy=(lambda i: ig.cross_entropy(wide, i[:, 0], return_gradient=True), some),
        linear_cross_entropy=(lambda i: ig.linear_cross_entropy(wide, normal(16, 16), i[:, 0]), some),
        distillation_loss=(lambda i: ig.distillation_loss(wide, np.full((50, 3), -2, "f"), 1.0, i), distinct),
    )
    if {signed}:
        calls |= dict(
            moe_permute=(lambda i: ig.moe_permute(wide, i, 1), all_rows),
            moe_permute_backward=(lambda i: ig.moe_permute_backward(wide, i, 1), all_rows),
            moe_combine=(lambda i: ig.moe_combine(wide, normal(50, 1), i), all_rows),
            moe_combine_backward=(lambda i: ig.moe_combine_backward(wide, wide, normal(50, 1), i), all_rows),
        )
    errors = set()
    for threads in (1, 2):
        ig.set_num_threads(threads)
        for name, (call, given) in calls.items():
            given = given.astype({dtype!r})
            loops, number = 1, 0
            while number < loops:
                loops, result = changed(number, call, given)
                if isinstance(result, str):
                    errors.add(name)
                    assert "changed during the call" in result or " is " in result, result
                number += 1
    print(*sorted(errors))
"""


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int64", 1 << 40),
        pytest.param("int64", -(1 << 40), marks=pytest.mark.thorough),
        pytest.param("int32", -(1 << 31), marks=pytest.mark.thorough),
        pytest.param("uint32", (1 << 32) - 1, marks=pytest.mark.thorough),
    ],
)
def test_indices_that_change_before_any_loop(run_python, dtype, value):
    raised = run_python(CODE.format(dtype=dtype, value=value, signed=dtype == "int64")).split()
    assert len(raised) > 15
