"""The problems of the attention family: one frozen description each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from isograd.core.checks import DTYPES, checked_dtype, checked_shape
from isograd.core.descriptor import Descriptor, Operand
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.flash_attention.options import AttentionOptions

LEAST_DIM, MOST_DIM, DIM_STEP = 16, 256, 8


def work_type(dtype: str) -> str:
    """The name of the type that a storage type is computed in."""
    return "float64" if dtype == "float64" else "float32"


def _flag(operation: str, argument: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidProblemError(f"{operation}: {argument} is {value!r}; expected True or False")
    return value


def _checked_dim(operation: str, argument: str, size: int) -> None:
    if not LEAST_DIM <= size <= MOST_DIM or size % DIM_STEP:
        raise UnsupportedError(
            f"{operation}: the head dimension of {argument} is {size}; accepted: {LEAST_DIM} to {MOST_DIM} in steps of "
            f"{DIM_STEP}"
        )


@dataclass(frozen=True, slots=True)
class AttentionDescriptor(Descriptor):
    """o, lse = the attention of q over k and v.

    batch, heads, kv_heads, q_length, k_length, head_dim, v_dim: B, Hq, Hkv, Lq, Lk, D and Dv of q [B, Hq, Lq, D],
    k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] and o [B, Hq, Lq, Dv]. Query head h reads head h // (Hq // Hkv) of k and v.
    dtype: of these. lse [B, Hq, Lq] is in the work type.

    bias_shape: four sizes, each that of [B, Hq, Lq, Lk] or 1, or None without a bias; bias_dtype: dtype or the work
    type. mask_shape: likewise of a boolean mask, True where a key is visible. segments: whether there are
    q_segment_ids [B, Lq] and k_segment_ids [B, Lk], int32; a query sees the keys of its own segment.

    sequences: N where B = 1 holds N sequences one after the other, with cu_seqlens_q and cu_seqlens_k [N + 1], int32:
    sequence n has the rows cu_seqlens[n] to cu_seqlens[n + 1]; None otherwise. Rows beyond the last sequence are 0,
    their lse -inf. sinks_dtype: dtype or the work type of the sinks [Hq], None without them.
    """

    batch: int
    heads: int
    kv_heads: int
    q_length: int
    k_length: int
    head_dim: int
    v_dim: int
    dtype: str
    options: AttentionOptions = field(default_factory=AttentionOptions)
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    mask_shape: tuple[int, ...] | None = None
    segments: bool = False
    sequences: int | None = None
    sinks_dtype: str | None = None

    @property
    def operation(self) -> str:
        """`attention`."""
        return "attention"

    @property
    def work(self) -> str:
        """The dtype of lse and its gradient."""
        return work_type(self.dtype)

    @property
    def groups(self) -> int:
        """Query heads that share a head of k and v."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def q_shape(self) -> tuple[int, ...]:
        """The shape of q."""
        return self.batch, self.heads, self.q_length, self.head_dim

    @property
    def k_shape(self) -> tuple[int, ...]:
        """The shape of k."""
        return self.batch, self.kv_heads, self.k_length, self.head_dim

    @property
    def v_shape(self) -> tuple[int, ...]:
        """The shape of v."""
        return self.batch, self.kv_heads, self.k_length, self.v_dim

    @property
    def o_shape(self) -> tuple[int, ...]:
        """The shape of o."""
        return self.batch, self.heads, self.q_length, self.v_dim

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of lse."""
        return self.batch, self.heads, self.q_length

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """What the bias and the mask broadcast to."""
        return self.batch, self.heads, self.q_length, self.k_length

    def options_operands(self) -> tuple[Operand, ...]:
        """The optional inputs that are there."""
        found = []
        if self.bias_shape is not None:
            found.append(Operand("bias", self.bias_shape, self.bias_dtype or self.dtype))
        if self.mask_shape is not None:
            found.append(Operand("mask", self.mask_shape, "bool"))
        if self.segments:
            found.append(Operand("q_segment_ids", (self.batch, self.q_length), "int32"))
            found.append(Operand("k_segment_ids", (self.batch, self.k_length), "int32"))
        if self.sequences is not None:
            found.append(Operand("cu_seqlens_q", (self.sequences + 1,), "int32"))
            found.append(Operand("cu_seqlens_k", (self.sequences + 1,), "int32"))
        if self.sinks_dtype is not None:
            found.append(Operand("sinks", (self.heads,), self.sinks_dtype))
        return tuple(found)

    def operands(self) -> tuple[Operand, ...]:
        """Q, k, v, (bias), (mask), (q_segment_ids, k_segment_ids), (cu_seqlens_q, cu_seqlens_k), (sinks) to o, lse."""
        return (
            Operand("q", self.q_shape, self.dtype),
            Operand("k", self.k_shape, self.dtype),
            Operand("v", self.v_shape, self.dtype),
            *self.options_operands(),
            Operand("o", self.o_shape, self.dtype, True),
            Operand("lse", self.lse_shape, self.work, True),
        )

    def validated(self) -> Self:
        """Return the descriptor with plain numbers, or raise what is wrong with it."""
        name = self.operation
        dtype = checked_dtype(name, self.dtype)
        given = (self.batch, self.heads, self.kv_heads, self.q_length, self.k_length, self.head_dim, self.v_dim)
        sizes = checked_shape(name, "(B, Hq, Hkv, Lq, Lk, D, Dv)", given)
        batch, heads, kv_heads, q_length, k_length, head_dim, v_dim = sizes
        if heads % kv_heads if kv_heads else heads:
            raise InvalidProblemError(
                f"{name}: q has {heads} heads and k and v have {kv_heads}; expected a multiple of the heads of k and v"
            )
        _checked_dim(name, "q and k", head_dim)
        _checked_dim(name, "v", v_dim)
        scores = (batch, heads, q_length, k_length)
        floats = (dtype,) if dtype == work_type(dtype) else (dtype, work_type(dtype))
        bias_shape = self._broadcast("bias", self.bias_shape, scores)
        bias_dtype = None
        if bias_shape is not None:
            bias_dtype = checked_dtype(name, self.bias_dtype or dtype, floats, "the bias's dtype")
        mask_shape = self._broadcast("mask", self.mask_shape, scores)
        segments, sequences = _flag(name, "segments", self.segments), self.sequences
        if sequences is not None:
            (sequences,) = checked_shape(name, "sequences", (sequences,))
            self._check_packed(batch, segments)
        sinks_dtype = self.sinks_dtype
        if sinks_dtype is not None:
            sinks_dtype = checked_dtype(name, sinks_dtype, floats, "the sinks' dtype")
        options = self.options.validated(name, head_dim, work_type(dtype))
        return replace(
            self,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            q_length=q_length,
            k_length=k_length,
            head_dim=head_dim,
            v_dim=v_dim,
            dtype=dtype,
            options=replace(options, scale=(options.scale or 0.0) + 0.0),  # one zero: kept plans of both are equal
            bias_shape=bias_shape,
            bias_dtype=bias_dtype,
            mask_shape=mask_shape,
            segments=segments,
            sequences=sequences,
            sinks_dtype=sinks_dtype,
        )

    def _broadcast(
        self, argument: str, shape: tuple[int, ...] | None, scores: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        if shape is None:
            return None
        sizes = checked_shape(self.operation, argument, shape)
        if len(sizes) != 4 or any(size not in (1, full) for size, full in zip(sizes, scores, strict=True)):
            raise InvalidProblemError(
                f"{self.operation}: {argument} has shape {sizes}; expected one that broadcasts to {scores}"
            )
        return sizes

    def _check_packed(self, batch: int, segments: bool) -> None:
        name = self.operation
        if batch != 1:
            raise InvalidProblemError(f"{name}: q has batch size {batch}; cu_seqlens are for packed sequences, batch 1")
        given = {"bias": self.bias_shape is not None, "mask": self.mask_shape is not None, "segment_ids": segments}
        for argument, present in given.items():
            if present:
                raise InvalidProblemError(f"{name}: {argument} and cu_seqlens are both given; accepted: one of them")


@dataclass(frozen=True, slots=True)
class AttentionBackwardDescriptor(AttentionDescriptor):
    """dq, dk, dv (and dbias, dsinks) from do, q, k, v, o and lse; fields as in AttentionDescriptor.

    dlse: whether there is a gradient of lse. dbias, dsinks: whether these gradients are wanted; they have the shape
    and dtype of the bias and the sinks.
    """

    dlse: bool = False
    dbias: bool = False
    dsinks: bool = False

    @property
    def operation(self) -> str:
        """`attention_backward`."""
        return "attention_backward"

    def operands(self) -> tuple[Operand, ...]:
        """Do, q, k, v, o, lse, (dlse) and the optional inputs to dq, dk, dv, (dbias), (dsinks)."""
        inputs = [
            Operand("do", self.o_shape, self.dtype),
            Operand("q", self.q_shape, self.dtype),
            Operand("k", self.k_shape, self.dtype),
            Operand("v", self.v_shape, self.dtype),
            Operand("o", self.o_shape, self.dtype),
            Operand("lse", self.lse_shape, self.work),
        ]
        if self.dlse:
            inputs.append(Operand("dlse", self.lse_shape, self.work))
        outputs = [
            Operand("dq", self.q_shape, self.dtype, True),
            Operand("dk", self.k_shape, self.dtype, True),
            Operand("dv", self.v_shape, self.dtype, True),
        ]
        if self.dbias and self.bias_shape is not None:
            outputs.append(Operand("dbias", self.bias_shape, self.bias_dtype or self.dtype, True))
        if self.dsinks and self.sinks_dtype is not None:
            outputs.append(Operand("dsinks", (self.heads,), self.sinks_dtype, True))
        return (*inputs, *self.options_operands(), *outputs)

    def validated(self) -> Self:
        """Return the descriptor with plain numbers, or raise what is wrong with it."""
        checked = AttentionDescriptor.validated(self)
        name = self.operation
        for argument in ("dlse", "dbias", "dsinks"):
            _flag(name, argument, getattr(self, argument))
        if self.dbias and self.bias_shape is None:
            raise InvalidProblemError(f"{name}: dbias is wanted without a bias")
        if self.dsinks and self.sinks_dtype is None:
            raise InvalidProblemError(f"{name}: dsinks are wanted without sinks")
        return checked


@dataclass(frozen=True, slots=True)
class AttentionWithCacheDescriptor(AttentionDescriptor):
    """o, lse = the causal attention of the newest queries of sequences over keys and values in a cache.

    Fields as in AttentionDescriptor, with options that are causal, lower right and without dropout, and no more
    operands than sinks. k_length: the most keys of a sequence, K. cache_seqlens [B], int32, says how many there are of
    each; query i of q_length is level with key cache_seqlens - q_length + i.

    page_size: None for k and v [B, Hkv, K, D]; else they are [pages, Hkv, page_size, D], and block_table [B, K /
    page_size], int32, has the pages of each sequence in their order. pages: their number in the cache.
    """

    page_size: int | None = None
    pages: int = 0

    @property
    def operation(self) -> str:
        """`attention_with_cache`."""
        return "attention_with_cache"

    @property
    def table_shape(self) -> tuple[int, int]:
        """The shape of block_table; (B, 0) without pages."""
        return self.batch, self.k_length // self.page_size if self.page_size else 0

    @property
    def k_shape(self) -> tuple[int, ...]:
        """The shape of k."""
        return self._cached(self.head_dim)

    @property
    def v_shape(self) -> tuple[int, ...]:
        """The shape of v."""
        return self._cached(self.v_dim)

    def _cached(self, size: int) -> tuple[int, ...]:
        if self.page_size is None:
            return self.batch, self.kv_heads, self.k_length, size
        return self.pages, self.kv_heads, self.page_size, size

    def options_operands(self) -> tuple[Operand, ...]:
        """cache_seqlens, (block_table), (sinks)."""
        found = [Operand("cache_seqlens", (self.batch,), "int32")]
        if self.page_size is not None:
            found.append(Operand("block_table", self.table_shape, "int32"))
        return (*found, *AttentionDescriptor.options_operands(self))

    def whole(self) -> AttentionDescriptor:
        """A forward pass over sequences as a whole, whose kernel serves their newest queries with the same bits."""
        return AttentionDescriptor(
            1, self.heads, self.kv_heads, 1, 1, self.head_dim, self.v_dim, self.dtype, self.options,
            sinks_dtype=self.sinks_dtype,
        )  # fmt: skip

    def validated(self) -> Self:
        """Return the descriptor with plain numbers, or raise what is wrong with it."""
        name = self.operation
        given = {"bias": self.bias_shape, "mask": self.mask_shape, "sequences": self.sequences}
        for argument, value in (given | {"segments": self.segments or None}).items():
            if value is not None:
                raise InvalidProblemError(f"{name}: {argument} is {value!r}; accepted: None")
        checked = AttentionDescriptor.validated(self)
        options = checked.options
        if not options.causal or options.alignment != "lower_right" or options.dropout_p:
            raise InvalidProblemError(
                f"{name}: options are {options}; accepted: causal, aligned to the lower right, without dropout"
            )
        (pages,) = checked_shape(name, "pages", (self.pages,))
        if self.page_size is None:
            return replace(checked, pages=0)
        (page_size,) = checked_shape(name, "page_size", (self.page_size,))
        if not page_size or checked.k_length % page_size:
            raise InvalidProblemError(
                f"{name}: page_size is {page_size} for {checked.k_length} keys; expected a divisor of them"
            )
        return replace(checked, page_size=page_size, pages=pages)


@dataclass(frozen=True, slots=True)
class AttentionDeltaDescriptor(Descriptor):
    """delta = the row sums of o · do, what the backward needs of them.

    batch, heads, length, v_dim: B, H, L and Dv of o and do [B, H, L, Dv]; dtype: of both. delta [B, H, L] is in the
    work type.
    """

    batch: int
    heads: int
    length: int
    v_dim: int
    dtype: str

    @property
    def operation(self) -> str:
        """`attention_delta`."""
        return "attention_delta"

    @property
    def o_shape(self) -> tuple[int, ...]:
        """The shape of o and do."""
        return self.batch, self.heads, self.length, self.v_dim

    def operands(self) -> tuple[Operand, ...]:
        """O and do, then delta."""
        return (
            Operand("o", self.o_shape, self.dtype),
            Operand("do", self.o_shape, self.dtype),
            Operand("delta", self.o_shape[:3], work_type(self.dtype), True),
        )

    def validated(self) -> Self:
        """Return the descriptor with plain ints, or raise what is wrong with it."""
        name = self.operation
        dtype = checked_dtype(name, self.dtype, DTYPES)
        given = (self.batch, self.heads, self.length, self.v_dim)
        batch, heads, length, v_dim = checked_shape(name, "(B, H, L, Dv)", given)
        _checked_dim(name, "o", v_dim)
        return type(self)(batch, heads, length, v_dim, dtype)
