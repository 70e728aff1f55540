"""What the router's functions return where it is more than one array."""

from typing import Generic, NamedTuple, TypeVar

ValueT = TypeVar("ValueT")
IndexT = TypeVar("IndexT")


class TopK(NamedTuple, Generic[ValueT, IndexT]):
    """The result of `top_k`."""

    values: ValueT
    indices: IndexT


class Routing(NamedTuple, Generic[ValueT, IndexT]):
    """The result of `moe_router`."""

    weights: ValueT
    experts: IndexT


class Permutation(NamedTuple, Generic[IndexT]):
    """The result of `expert_permutation`."""

    order: IndexT
    offsets: IndexT


class CombineGradients(NamedTuple, Generic[ValueT]):
    """The result of `moe_combine_backward`."""

    d_expert_out: ValueT
    dweights: ValueT
