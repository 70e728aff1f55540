// What a softmax over a row is computed from, in Metal; for the softmax family and the router. Formulas: reference.py.
#pragma once
#include "isograd/numerics/metal_sums.h"

namespace isograd {

// --- what a row's exponentials are computed from ---------------------------------------------------------------------
// Exponentials are exp(x - base) / 2^exponent, times 2^64 (in 16 bits 2^30); a row without a finite maximum is not
// valid.
struct Row {
  int key;
  bool valid;
  float m, base, floor;
  int exponent;
};

inline Row row_of(int key, bool is_short) {
  Row row;
  row.key = key;
  row.m = from_key(key);
  row.valid = is_finite(row.m);
  row.base = row.m;
  row.floor = EXP_FLOOR;
  row.exponent = 0;
  if (!is_short && row.valid && magnitude(row.m) < magnitude(EXP_DIRECT)) {
    row.base = 0.0f;
    row.floor = row.m + EXP_FLOOR;
    row.exponent = int(fma(row.m, LOG2E, MAGIC) - MAGIC);
  }
  return row;
}

// The scaled exponential of an element and its rounding error
inline Pair exponential_of(float x, Row row, bool is_short) {
  Pair p;
  const float d = x - row.base;
  if (is_short) {
    p.high = exponential_short(d);
    p.low = 0.0f;
    return p;
  }
  const Exponential e = exp_parts(d > row.floor ? d : row.floor);
  const float scale = pow2(e.k - row.exponent + EXP_SCALE);
  const float sum = e.s + e.t;
  p.high = sum * scale;
  p.low = ((e.s - sum) + e.t) * scale;
  return p;
}

inline int quantum_bits(long n, bool is_short) { return is_short && n <= SHORT_ROW ? SHORT_BITS : QUANTUM_BITS; }

inline long exponential_term(Pair e, long n, bool is_short) {
  if (is_short) return scaled_integer(e.high, quantum_bits(n, true) - SHORT_BITS);
  return scaled_integer(e.high, QUANTUM_BITS - EXP_SCALE) + scaled_integer(e.low, QUANTUM_BITS - EXP_SCALE);
}

template <typename X>
int row_key(X x, long step, long n, uint lane, uint threads, threadgroup long* part) {
  int key = INT_LEAST;
  for (long j = lane; j < n; j += threads) key = max(key, max_key(widen(x[j * step])));
  return reduced_max(key, lane, threads, part);
}

template <typename X>
Wide exponential_sum(X x, long step, long n, Row row, bool is_short, uint lane, uint threads,
                     threadgroup long* part) {
  Wide sum = nothing();
  if (row.valid) {
    for (long j = lane; j < n; j += threads) {
      add(sum, exponential_term(exponential_of(widen(x[j * step]), row, is_short), n, is_short));
    }
  }
  return reduced_sum(sum, lane, threads, part);
}

// --- softmax ---------------------------------------------------------------------------------------------------------
// 1 / sum as a pair, the scale of the exponentials taken out
inline Pair reciprocal(Wide sum, long n, bool is_short) {
  Pair r;
  if (is_short) {
    r.high = quotient(1.0f, number(sum, SHORT_BITS - quantum_bits(n, true)));
    r.low = 0.0f;
    return r;
  }
  const Pair s = number_pair(sum, -QUANTUM_BITS);
  const float whole = quotient(1.0f, s.high);
  const float low = times(fused(negative(whole), s.low, fma(negative(whole), s.high, 1.0f)), whole);
  r.high = whole * pow2(-EXP_SCALE);
  r.low = times(low, pow2(-EXP_SCALE));
  return r;
}

inline float quotient_of(float x, Row row, Pair r, bool is_short) {
  const Pair e = exponential_of(x, row, is_short);
  if (is_short) return times(e.high, r.high);
  const float low = times(e.high, r.low);
  // The largest elements carry their rounding error as well: equal elements give 1 / n, one alone gives 1.
  return fused(e.high, r.high, max_key(x) == row.key ? fused(e.low, r.high, low) : low);
}

}  // namespace isograd
