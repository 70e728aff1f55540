// The softmax family in Metal: one threadgroup a row, any strides, float, half, bfloat. Formulas: reference.py.
#include "isograd/rows/metal_rows.h"

namespace isograd {

// --- softmax ---------------------------------------------------------------------------------------------------------
template <typename X, typename Y>
void softmax_row(X x, long x_step, Y y, long y_step, long n, uint lane, uint threads, threadgroup long* part) {
  const bool is_short = sizeof(x[0]) == 2;
  const Row row = row_of(row_key(x, x_step, n, lane, threads, part), is_short);
  const Wide sum = exponential_sum(x, x_step, n, row, is_short, lane, threads, part);
  const Pair r = reciprocal(sum, n, is_short);
  for (long j = lane; j < n; j += threads) {
    store(y, j * y_step, row.valid ? quotient_of(widen(x[j * x_step]), row, r, is_short) : canonical_nan());
  }
}

// --- log_softmax -----------------------------------------------------------------------------------------------------
// m + log(sum / largest term) in three parts; in 16 bits that logarithm alone in `top`
struct LogSum {
  float top, middle, low;
};

inline LogSum log_sum(Wide sum, long n, Row row, bool is_short) {
  const Pair e = exponential_of(row.m, row, is_short);
  // The largest term leaves the sum as an integer: a logarithm of the rounded sum would lose the small terms.
  add(sum, -exponential_term(e, n, is_short));
  const Pair rest = number_pair(sum, -quantum_bits(n, is_short));
  const float down = pow2(is_short ? -SHORT_BITS : -EXP_SCALE), whole = e.high * down, error = times(e.low, down);
  const float t = quotient(rest.high, whole);
  const float left = fused(negative(t), whole, rest.high) + rest.low;
  const Pair log = log1p_pair(t, quotient(left - times(t, error), whole));
  LogSum l;
  if (is_short) {
    l.top = log.high;
    l.middle = 0.0f;
    l.low = 0.0f;
    return l;
  }
  const Pair top = two_sum(row.m, log.high);
  l.top = top.high;
  l.middle = top.low;
  l.low = log.low;
  return l;
}

inline float log_quotient_of(float x, Row row, LogSum l, bool is_short) {
  if (is_short) return (x - row.m) - l.top;
  const Pair u = two_sum(x, negative(l.top));
  // u is infinite where x is or the difference overflows; its error is no number there.
  return is_finite(u.high) ? u.high + ((u.low - l.middle) - l.low) : u.high;
}

template <typename X, typename Y>
void log_softmax_row(X x, long x_step, Y y, long y_step, long n, uint lane, uint threads, threadgroup long* part) {
  const bool is_short = sizeof(x[0]) == 2;
  const Row row = row_of(row_key(x, x_step, n, lane, threads, part), is_short);
  const Wide sum = exponential_sum(x, x_step, n, row, is_short, lane, threads, part);
  LogSum l;
  l.top = l.middle = l.low = 0.0f;
  if (row.valid) l = log_sum(sum, n, row, is_short);
  for (long j = lane; j < n; j += threads) {
    store(y, j * y_step, row.valid ? log_quotient_of(widen(x[j * x_step]), row, l, is_short) : canonical_nan());
  }
}

// --- backward --------------------------------------------------------------------------------------------------------
// The terms of the gradient's sum: y * dy, or dy for log_softmax
template <bool LOG, typename D, typename Y>
struct GradientTerms {
  D dy;
  long dy_step;
  Y y;
  long y_step;
  float at(long j) const {
    const float g = widen(dy[j * dy_step]);
    return LOG ? g : times(widen(y[j * y_step]), g);
  }
};

template <bool LOG, typename D, typename Y, typename X>
void backward_row(D dy, long dy_step, Y y, long y_step, X dx, long dx_step, long n, uint lane, uint threads,
                  threadgroup long* part) {
  const bool is_short = sizeof(y[0]) == 2;
  GradientTerms<LOG, D, Y> terms;
  terms.dy = dy;
  terms.dy_step = dy_step;
  terms.y = y;
  terms.y_step = y_step;
  const float sum = order_free_sum(terms, n, lane, threads, part);
  for (long j = lane; j < n; j += threads) {
    const float g = widen(dy[j * dy_step]), v = widen(y[j * y_step]);
    if (LOG) {
      const float e = is_short ? exponential_short_any(v) : exponential(v);
      store(dx, j * dx_step, fused(negative(e), sum, g));
    } else {
      store(dx, j * dx_step, times(v, plus(g, negative(sum))));
    }
  }
}

}  // namespace isograd

// --- entry points ----------------------------------------------------------------------------------------------------
// layout: rows, columns, number of outer dimensions, their sizes, and for every operand its stride along the axis and
// along the outer dimensions
template <typename T, bool LOG>
[[kernel]] void forward_rows(device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
                             constant long* layout [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                             uint groups [[threadgroups_per_grid]], uint lane [[thread_position_in_threadgroup]],
                             uint threads [[threads_per_threadgroup]]) {
  threadgroup long part[512];
  const long rows = layout[0], n = layout[1];
  const int rank = int(layout[2]);
  constant long* shape = layout + 3;
  constant long* x_strides = shape + rank;
  constant long* y_strides = x_strides + rank + 1;
  for (long row = group; row < rows; row += groups) {
    device const T* from = x + isograd::row_offset(row, rank, shape, x_strides + 1);
    device T* to = y + isograd::row_offset(row, rank, shape, y_strides + 1);
    if (LOG) {
      isograd::log_softmax_row(from, x_strides[0], to, y_strides[0], n, lane, threads, part);
    } else {
      isograd::softmax_row(from, x_strides[0], to, y_strides[0], n, lane, threads, part);
    }
  }
}

template <typename T, bool LOG>
[[kernel]] void backward_rows(device const T* dy [[buffer(0)]], device const T* y [[buffer(1)]],
                              device T* dx [[buffer(2)]], constant long* layout [[buffer(3)]],
                              uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
                              uint lane [[thread_position_in_threadgroup]],
                              uint threads [[threads_per_threadgroup]]) {
  threadgroup long part[512];
  const long rows = layout[0], n = layout[1];
  const int rank = int(layout[2]);
  constant long* shape = layout + 3;
  constant long* dy_strides = shape + rank;
  constant long* y_strides = dy_strides + rank + 1;
  constant long* dx_strides = y_strides + rank + 1;
  for (long row = group; row < rows; row += groups) {
    isograd::backward_row<LOG>(dy + isograd::row_offset(row, rank, shape, dy_strides + 1), dy_strides[0],
                               y + isograd::row_offset(row, rank, shape, y_strides + 1), y_strides[0],
                               dx + isograd::row_offset(row, rank, shape, dx_strides + 1), dx_strides[0], n, lane,
                               threads, part);
  }
}

template [[host_name("softmax_float32")]] [[kernel]]
decltype(forward_rows<float, false>) forward_rows<float, false>;
template [[host_name("softmax_float16")]] [[kernel]]
decltype(forward_rows<half, false>) forward_rows<half, false>;
template [[host_name("softmax_bfloat16")]] [[kernel]]
decltype(forward_rows<bfloat, false>) forward_rows<bfloat, false>;
template [[host_name("log_softmax_float32")]] [[kernel]]
decltype(forward_rows<float, true>) forward_rows<float, true>;
template [[host_name("log_softmax_float16")]] [[kernel]]
decltype(forward_rows<half, true>) forward_rows<half, true>;
template [[host_name("log_softmax_bfloat16")]] [[kernel]]
decltype(forward_rows<bfloat, true>) forward_rows<bfloat, true>;
template [[host_name("softmax_backward_float32")]] [[kernel]]
decltype(backward_rows<float, false>) backward_rows<float, false>;
template [[host_name("softmax_backward_float16")]] [[kernel]]
decltype(backward_rows<half, false>) backward_rows<half, false>;
template [[host_name("softmax_backward_bfloat16")]] [[kernel]]
decltype(backward_rows<bfloat, false>) backward_rows<bfloat, false>;
template [[host_name("log_softmax_backward_float32")]] [[kernel]]
decltype(backward_rows<float, true>) backward_rows<float, true>;
template [[host_name("log_softmax_backward_float16")]] [[kernel]]
decltype(backward_rows<half, true>) backward_rows<half, true>;
template [[host_name("log_softmax_backward_bfloat16")]] [[kernel]]
decltype(backward_rows<bfloat, true>) backward_rows<bfloat, true>;
