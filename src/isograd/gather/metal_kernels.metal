// take_along_axis and its gradient in Metal: any strides, integer arithmetic alone. Formulas: reference.py.
#include "isograd/numerics/metal_sums.h"

namespace isograd {

// An index counted from the front, or -1 where it is out of range
template <typename I>
long place_of(I index, long size) {
  const long i = long(index);
  return i < -size || i >= size ? -1 : i < 0 ? i + size : i;
}

// v[i] = x[index] for an element i; T has the bits of the stored type
template <typename T, typename X, typename I, typename V, typename P>
void take_element(long i, X x, I indices, V v, P layout, device long* flag) {
  const long size = layout[1], step = layout[2];
  const int rank = int(layout[5]);
  P shape = layout + 6;
  P x_strides = shape + rank;
  P index_strides = x_strides + rank;
  P v_strides = index_strides + rank;
  const long place = place_of(indices[row_offset(i, rank, shape, index_strides)], size);
  const long to = row_offset(i, rank, shape, v_strides);
  if (place < 0) {
    report(flag, layout[3], i, long(indices[row_offset(i, rank, shape, index_strides)]), size);
    v[to] = T(layout[4]);
  } else {
    v[to] = x[row_offset(i, rank, shape, x_strides) + place * step];
  }
}

// The sources of one destination, a list that begins with `first`; a source's number is one more than its place.
template <typename V, typename N>
float list_sum(uint first, V values, long step, N next) {
  uint largest = 0;
  int marks = 0;
  for (uint j = first; j != 0; j = next[j - 1]) {
    const float p = widen(values[long(j - 1) * step]);
    if (magnitude(p) > largest) largest = magnitude(p);
    marks |= special_mark(p);
  }
  if (marks != 0) return special_sum(marks);
  const int exponent = term_exponent(largest);
  Wide sum = nothing();
  for (uint j = first; j != 0; j = next[j - 1]) {
    add(sum, scaled_integer(widen(values[long(j - 1) * step]), QUANTUM_BITS - exponent));
  }
  return number(sum, exponent - QUANTUM_BITS);
}

// A line of k sources summed into n destinations. `heads` (n words) and `next` (k words) are scratch memory of the
// group: the sources of each destination in a list, whose order differs from run to run and changes no sum.
template <typename I, typename V, typename O>
void scatter_line(I indices, long index_step, V values, long value_step, O out, long out_step, long n, long k,
                  device uint* heads, device uint* next, device long* flag, long code, long position,
                  long position_step, uint lane, uint threads) {
  // The next line may begin at once: a thread reads and clears the heads of its own destinations alone, and no source
  // is listed before all have arrived here.
  for (long d = lane; d < n; d += threads) heads[d] = 0;
  threadgroup_barrier(mem_flags::mem_device);
  for (long j = lane; j < k; j += threads) {
    const long place = place_of(indices[j * index_step], n);
    if (place < 0) {
      report(flag, code, position + j * position_step, long(indices[j * index_step]), n);
    } else {
      next[j] = atomic_exchange_explicit((device atomic_uint*)(heads + place), uint(j) + 1, memory_order_relaxed);
    }
  }
  threadgroup_barrier(mem_flags::mem_device);
  for (long d = lane; d < n; d += threads) store(out, d * out_step, list_sum(heads[d], values, value_step, next));
}

}  // namespace isograd

// --- entry points ----------------------------------------------------------------------------------------------------
// layout: elements of v, size of the axis, x's stride along it, code of the fault, bits of NaN, rank, shape of v, and
// the strides of x (0 along the axis), indices and v
template <typename T, typename I>
[[kernel]] void take(device const T* x [[buffer(0)]], device const I* indices [[buffer(1)]], device T* v [[buffer(2)]],
                     constant long* layout [[buffer(3)]], device long* flag [[buffer(4)]],
                     uint thread_index [[thread_position_in_grid]], uint count [[threads_per_grid]]) {
  for (long i = thread_index; i < layout[0]; i += count) {
    isograd::take_element<T>(i, x, indices, v, layout, flag);
  }
}

// layout: lines, n, k, words of scratch memory a group, code of the fault, rank of the other dimensions, their sizes,
// and for indices, values, out and the flat position: the stride along the axis and along the others
template <typename T, typename I>
[[kernel]] void scatter(device const I* indices [[buffer(0)]], device const T* values [[buffer(1)]],
                        device T* out [[buffer(2)]], device uint* scratch [[buffer(3)]],
                        constant long* layout [[buffer(4)]], device long* flag [[buffer(5)]],
                        uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
                        uint lane [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  const long lines = layout[0], n = layout[1], k = layout[2];
  const int rank = int(layout[5]);
  constant long* shape = layout + 6;
  constant long* index_strides = shape + rank;
  constant long* value_strides = index_strides + rank + 1;
  constant long* out_strides = value_strides + rank + 1;
  constant long* position_strides = out_strides + rank + 1;
  device uint* heads = scratch + group * layout[3];
  for (long line = group; line < lines; line += groups) {
    isograd::scatter_line(indices + isograd::row_offset(line, rank, shape, index_strides + 1), index_strides[0],
                          values + isograd::row_offset(line, rank, shape, value_strides + 1), value_strides[0],
                          out + isograd::row_offset(line, rank, shape, out_strides + 1), out_strides[0], n, k, heads,
                          heads + n, flag, layout[4], isograd::row_offset(line, rank, shape, position_strides + 1),
                          position_strides[0], lane, threads);
  }
}

template [[host_name("take_16_int32")]] [[kernel]]
decltype(take<ushort, int>) take<ushort, int>;
template [[host_name("take_16_int64")]] [[kernel]]
decltype(take<ushort, long>) take<ushort, long>;
template [[host_name("take_16_uint32")]] [[kernel]]
decltype(take<ushort, uint>) take<ushort, uint>;
template [[host_name("take_32_int32")]] [[kernel]]
decltype(take<uint, int>) take<uint, int>;
template [[host_name("take_32_int64")]] [[kernel]]
decltype(take<uint, long>) take<uint, long>;
template [[host_name("take_32_uint32")]] [[kernel]]
decltype(take<uint, uint>) take<uint, uint>;
template [[host_name("scatter_float32_int32")]] [[kernel]]
decltype(scatter<float, int>) scatter<float, int>;
template [[host_name("scatter_float32_int64")]] [[kernel]]
decltype(scatter<float, long>) scatter<float, long>;
template [[host_name("scatter_float32_uint32")]] [[kernel]]
decltype(scatter<float, uint>) scatter<float, uint>;
template [[host_name("scatter_float16_int32")]] [[kernel]]
decltype(scatter<half, int>) scatter<half, int>;
template [[host_name("scatter_float16_int64")]] [[kernel]]
decltype(scatter<half, long>) scatter<half, long>;
template [[host_name("scatter_float16_uint32")]] [[kernel]]
decltype(scatter<half, uint>) scatter<half, uint>;
template [[host_name("scatter_bfloat16_int32")]] [[kernel]]
decltype(scatter<bfloat, int>) scatter<bfloat, int>;
template [[host_name("scatter_bfloat16_int64")]] [[kernel]]
decltype(scatter<bfloat, long>) scatter<bfloat, long>;
template [[host_name("scatter_bfloat16_uint32")]] [[kernel]]
decltype(scatter<bfloat, uint>) scatter<bfloat, uint>;
