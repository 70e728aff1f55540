// Order-free sums in the Metal Shading Language (rules 4 and 5), over the terms of a row and over a threadgroup; what
// the families share besides.
#pragma once
#include "isograd/numerics/metal_ops.h"

namespace isograd {

// --- exact integer sums (rules 4 and 5) ------------------------------------------------------------------------------
// high * 2^32 + low; `add` may be called 2^31 times
struct Wide {
  long high, low;
};

inline Wide nothing() {
  Wide w;
  w.high = 0;
  w.low = 0;
  return w;
}

inline void add(thread Wide& sum, long k) {
  sum.high += k >> 32;
  sum.low += k & 0xFFFFFFFFl;
}

inline Wide carried(Wide sum) {
  Wide w;
  w.high = sum.high + (sum.low >> 32);
  w.low = sum.low & 0xFFFFFFFFl;
  return w;
}

// An integer rounded to 24 bits: m * 2^e
struct Rounded {
  bool minus;
  ulong m;
  int e;
};

inline Rounded rounded(Wide sum) {
  Wide w = carried(sum);
  Rounded r;
  r.minus = w.high < 0;
  if (r.minus) {
    w.high = -w.high;
    w.low = -w.low;
    w = carried(w);
  }
  const int excess = bit_length(ulong(w.high)) - 31;
  r.e = 0;
  if (excess <= 0) {
    r.m = (ulong(w.high) << 32) | ulong(w.low);
  } else {
    r.e = excess;  // at most 32
    r.m = (ulong(w.high) << (32 - excess)) | shift_sticky(ulong(w.low), excess);
  }
  const int cut = bit_length(r.m) - 24;
  if (cut > 0) {
    r.m = shift_rounded(r.m, cut);
    r.e += cut;
  }
  return r;
}

// The sum times 2^exponent, rounded once, or twice where the result is subnormal
inline float number(Wide sum, int exponent) {
  const Rounded r = rounded(sum);
  return packed(r.minus, r.m, r.e + exponent);
}

// The same for sums below 2^86, and what the rounding left, rounded once
inline Pair number_pair(Wide sum, int exponent) {
  const Rounded r = rounded(sum);
  // The rest is below 2^62, so arithmetic modulo 2^64 finds it.
  const Wide w = carried(sum);
  const ulong head = r.e > 63 ? 0 : r.m << r.e, all = (ulong(w.high) << 32) + ulong(w.low);
  Wide rest = nothing();
  add(rest, long(r.minus ? all + head : all - head));
  Pair p;
  p.high = packed(r.minus, r.m, r.e + exponent);
  p.low = number(rest, exponent);
  return p;
}

// Exponent of the largest term of a sum, from its magnitude's bits
inline int term_exponent(uint largest) {
  const int e = int(largest >> 23) - 127;
  return e < -126 ? -126 : e;
}

// What IEEE addition gives in any order: 1 for a positive infinity among the terms, 2 for a negative one, 3 for NaN
inline int special_mark(float p) { return is_finite(p) ? 0 : is_nan(p) ? 3 : is_negative(p) ? 2 : 1; }
inline float special_sum(int marks) { return marks == 3 ? canonical_nan() : infinity(marks == 2); }

// --- reductions over a threadgroup -----------------------------------------------------------------------------------
// `part` has two longs a thread; the number of threads is a multiple of 32. All threads get the result. The first
// barrier waits for those that still read what the reduction before left.

inline long larger(long a, long b) { return a < b ? b : a; }

inline int reduced_max(int value, uint lane, uint threads, threadgroup long* part) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  part[lane] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane < 32) {
    for (uint i = lane + 32; i < threads; i += 32) part[lane] = larger(part[lane], part[i]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  long most = part[0];
  for (uint i = 1; i < 32; i++) most = larger(most, part[i]);
  return int(most);
}

inline int reduced_marks(int value, uint lane, uint threads, threadgroup long* part) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  part[lane] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  long all = 0;
  for (uint i = 0; i < threads; i++) all |= part[i];
  return int(all);
}

inline Wide reduced_sum(Wide value, uint lane, uint threads, threadgroup long* part) {
  const Wide own = carried(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  part[lane] = own.high;
  part[threads + lane] = own.low;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane < 32) {
    for (uint i = lane + 32; i < threads; i += 32) {
      part[lane] += part[i];
      part[threads + lane] += part[threads + i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Wide sum = nothing();
  for (uint i = 0; i < 32; i++) {
    sum.high += part[i];
    sum.low += part[threads + i];
  }
  return sum;
}

// The sum of terms.at(0), .., terms.at(n - 1) in any order (rule 4), for all threads of a group
template <typename Terms>
float order_free_sum(Terms terms, long n, uint lane, uint threads, threadgroup long* part) {
  int largest = 0;
  for (long j = lane; j < n; j += threads) largest = max(largest, int(magnitude(terms.at(j))));
  largest = reduced_max(largest, lane, threads, part);
  if (uint(largest) >= INFINITE) {
    int marks = 0;
    for (long j = lane; j < n; j += threads) marks |= special_mark(terms.at(j));
    return special_sum(reduced_marks(marks, lane, threads, part));
  }
  const int exponent = term_exponent(uint(largest));
  Wide sum = nothing();
  for (long j = lane; j < n; j += threads) add(sum, scaled_integer(terms.at(j), QUANTUM_BITS - exponent));
  return number(reduced_sum(sum, lane, threads, part), exponent - QUANTUM_BITS);
}

// --- indices out of range --------------------------------------------------------------------------------------------
// flag: code or 0, flat position, value, size of the axis; the first thread to find a 0 there writes. Metal compares
// and exchanges 32 bits, the lower half of the first number.
inline void report(device long* flag, long code, long position, long value, long size) {
  bool first = false;
  uint found = 0;
  while (!first && found == 0) {  // an exchange may fail without a reason
    first = atomic_compare_exchange_weak_explicit((device atomic_uint*)flag, &found, uint(code), memory_order_relaxed,
                                                  memory_order_relaxed);
  }
  if (first) {
    flag[1] = position;
    flag[2] = value;
    flag[3] = size;
  }
}

// --- strided rows ----------------------------------------------------------------------------------------------------
// Offset of a row; its index counts over `rank` outer dimensions, the last one fastest.
template <typename P>
long row_offset(long row, int rank, P shape, P strides) {
  long offset = 0;
  for (int i = rank - 1; i >= 0; i--) {
    const long rest = row / shape[i];
    offset += (row - rest * shape[i]) * strides[i];
    row = rest;
  }
  return offset;
}

}  // namespace isograd
