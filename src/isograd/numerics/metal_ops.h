// The arithmetic contract in the Metal Shading Language; numerics/reference.py is the definition.
//
// Apple GPUs may flush subnormal numbers, as operands and as results. Where a subnormal can occur and matters, the
// functions below take over from the hardware with integers: `times`, `plus`, `fused` and `quotient` return what IEEE
// 754 asks for, whatever the hardware does with subnormals. Conversions, sums and divisions are integer arithmetic
// throughout. Comparisons are made between keys, since a flushed operand would compare equal to zero.
#pragma once
#include <metal_stdlib>
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#pragma clang fp contract(off)
using namespace metal;

namespace isograd {

constant constexpr int NAN_BITS = 0x7FC00000;
constant constexpr uint INFINITE = 0x7F800000;
constant constexpr uint SMALLEST_NORMAL = 0x00800000;
constant constexpr int INT_LEAST = -0x7FFFFFFF - 1;

constant constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
constant constexpr float LOG2E = 1.44269502162933350f;
constant constexpr float LN2 = 0.693147182464599609f;
constant constexpr float LN2_REST = -1.90465421212593e-09f;
constant constexpr float LN2_HI = 0.693145751953125000f;
constant constexpr float LN2_LO = 1.42860676533018704e-06f;
constant constexpr float EXP_0 = 0.499999940395355225f;
constant constexpr float EXP_1 = 0.166665196418762207f;
constant constexpr float EXP_2 = 0.0416683927178382874f;
constant constexpr float EXP_3 = 0.00836877990514040000f;
constant constexpr float EXP_4 = 0.00138144963420927525f;
constant constexpr float EXP2_0 = 0.693124115467071533f;
constant constexpr float EXP2_1 = 0.240241035819053650f;
constant constexpr float EXP2_2 = 0.0559072159230709076f;
constant constexpr float EXP2_3 = 0.00958279240876436234f;
constant constexpr float LOG_0 = 0.666666686534881592f;
constant constexpr float LOG_1 = 0.400002866983413696f;
constant constexpr float LOG_2 = 0.285397619009017944f;
constant constexpr float LOG_3 = 0.235421910881996155f;
constant constexpr float LOG1P_LOW = -0.289999991655349731f;
constant constexpr float LOG1P_HIGH = 0.409999996423721313f;
constant constexpr float EXP_FLOOR = -105.0f;
constant constexpr float EXP_CEIL = 89.5f;
constant constexpr float EXP_DIRECT = 256.0f;
constant constexpr float SHORT_LEAST = -156.0f;
constant constexpr float SHORT_LOW = -126.0f;
constant constexpr float SHORT_HIGH = 128.0f;
constant constexpr int EXP_SCALE = 64;
constant constexpr int SHORT_BITS = 30;
constant constexpr int QUANTUM_BITS = 44;
constant constexpr long SHORT_ROW = 262144;
constant constexpr int SQRT_HALF_BITS = 0x3F3504F3;

// --- bits ------------------------------------------------------------------------------------------------------------
inline int as_int(float x) { return as_type<int>(x); }
inline float as_float(int bits) { return as_type<float>(bits); }
inline uint magnitude(float x) { return as_type<uint>(x) & 0x7FFFFFFFu; }
inline bool is_negative(float x) { return as_type<int>(x) < 0; }
inline bool is_nan(float x) { return magnitude(x) > INFINITE; }
inline bool is_finite(float x) { return magnitude(x) < INFINITE; }
inline bool is_zero(float x) { return magnitude(x) == 0; }
inline bool is_subnormal(float x) { return magnitude(x) - 1u < SMALLEST_NORMAL - 1u; }
inline bool is_normal(float x) { return magnitude(x) - SMALLEST_NORMAL < INFINITE - SMALLEST_NORMAL; }
inline float negative(float x) { return as_float(as_int(x) ^ INT_LEAST); }
inline float canonical_nan() { return as_float(NAN_BITS); }
inline float infinity(bool minus) { return as_float(minus ? int(INFINITE | 0x80000000u) : int(INFINITE)); }
inline float zero(bool minus) { return as_float(minus ? INT_LEAST : 0); }

// 2^k, -126 <= k <= 127
inline float pow2(int k) { return as_float((k + 127) << 23); }

// An integer in the order of the floats, NaN of either sign the largest.
inline int max_key(float x) { return is_nan(x) ? 0x7FFFFFFF : as_int(x) ^ ((as_int(x) >> 31) & 0x7FFFFFFF); }
inline float from_key(int key) { return as_float(key ^ ((key >> 31) & 0x7FFFFFFF)); }

// --- numbers as integers ---------------------------------------------------------------------------------------------
// |x| = m * 2^e; m of 24 bits, or less where x is subnormal or zero
struct Parts {
  ulong m;
  int e;
};

inline Parts parts(float x) {
  const uint bits = magnitude(x), field = bits >> 23;
  Parts p;
  p.m = field == 0 ? bits : (bits & 0x007FFFFFu) | SMALLEST_NORMAL;
  p.e = (field == 0 ? 1 : int(field)) - 150;
  return p;
}

// The same with m of 24 bits for every x but zero.
inline Parts normal_parts(float x) {
  Parts p = parts(x);
  if (p.m != 0) {
    const int shift = int(clz(uint(p.m))) - 8;
    p.m <<= shift;
    p.e -= shift;
  }
  return p;
}

inline int bit_length(ulong m) {
  const uint high = uint(m >> 32);
  return high != 0 ? 64 - int(clz(high)) : 32 - int(clz(uint(m)));
}

// m / 2^shift, rounded to nearest even
inline ulong shift_rounded(ulong m, int shift) {
  if (shift <= 0) return m << -shift;
  if (shift > 63) return 0;
  const ulong quotient = m >> shift, rest = m & ((1ul << shift) - 1), half_way = 1ul << (shift - 1);
  return quotient + ((rest > half_way || (rest == half_way && (quotient & 1) != 0)) ? 1 : 0);
}

// m / 2^shift, what is lost kept in the last bit
inline ulong shift_sticky(ulong m, int shift) {
  if (shift <= 0) return m;
  if (shift > 63) return m != 0 ? 1 : 0;
  return (m >> shift) | ((m & ((1ul << shift) - 1)) != 0 ? 1 : 0);
}

// m * 2^e as a float, rounded once, with gradual underflow
inline float packed(bool minus, ulong m, int e) {
  if (m == 0) return zero(minus);
  const int least = e + bit_length(m) - 24, unit = least < -149 ? -149 : least;
  if (unit > 104) return infinity(minus);
  const ulong rounded = shift_rounded(m, unit - e);
  const ulong bits = (ulong(unit + 149) << 23) + rounded;  // the leading bit of `rounded` carries into the exponent
  if (bits >= INFINITE) return infinity(minus);
  return as_float(int(bits) | (minus ? INT_LEAST : 0));
}

// rint(x * 2^shift) for a finite x, below 2^62 in magnitude
inline long scaled_integer(float x, int shift) {
  const Parts p = parts(x);
  const int up = p.e + shift;
  const long k = long(shift_rounded(p.m, -up));
  return is_negative(x) ? -k : k;
}

// --- + - * / fma that do not depend on what becomes of subnormals ----------------------------------------------------
// A normal number of the same sign in place of a subnormal one, where only the sign matters.
inline float lifted(float x) { return is_subnormal(x) ? as_float((as_int(x) & INT_LEAST) | int(SMALLEST_NORMAL)) : x; }

inline float times_exact(float a, float b) {
  if (!is_finite(a) || !is_finite(b)) return lifted(a) * lifted(b);
  const Parts p = parts(a), q = parts(b);
  return packed(is_negative(a) != is_negative(b), p.m * q.m, p.e + q.e);
}

inline float fused_exact(float a, float b, float c) {
  if (!is_finite(a) || !is_finite(b) || !is_finite(c)) return fma(lifted(a), lifted(b), lifted(c));
  const bool minus = is_negative(a) != is_negative(b), minus_c = is_negative(c);
  const Parts p = normal_parts(a), q = normal_parts(b), r = normal_parts(c);
  if (p.m == 0 || q.m == 0) return r.m == 0 ? zero(minus && minus_c) : c;
  if (r.m == 0) return packed(minus, p.m * q.m, p.e + q.e);
  // Both of 61 or 62 bits, so that a shift loses bits only where the sum keeps nearly all of its own.
  ulong m = (p.m * q.m) << 14, n = r.m << 38;
  int e = p.e + q.e - 14;
  const int d = e - (r.e - 38);
  if (d >= 0) {
    n = shift_sticky(n, d);
  } else {
    m = shift_sticky(m, -d);
    e -= d;
  }
  if (minus == minus_c) return packed(minus, m + n, e);
  if (m == n) return zero(false);
  return m > n ? packed(minus, m - n, e) : packed(minus_c, n - m, e);
}

inline float times(float a, float b) {
  const float p = a * b;
  return is_normal(p) ? p : times_exact(a, b);
}

inline float fused(float a, float b, float c) {
  const float r = fma(a, b, c);
  const bool plain = is_normal(r) && !is_subnormal(a) && !is_subnormal(b) && !is_subnormal(c);
  return plain ? r : fused_exact(a, b, c);
}

// A subnormal operand changes no sum of 2^-100 or more.
inline float plus(float a, float b) {
  const float s = a + b;
  return magnitude(s) >= 0x0D800000u ? s : fused_exact(a, 1.0f, b);
}

inline float quotient(float a, float b) {
  const bool minus = is_negative(a) != is_negative(b);
  if (is_nan(a) || is_nan(b) || (is_zero(a) && is_zero(b)) || (!is_finite(a) && !is_finite(b))) return canonical_nan();
  if (!is_finite(a) || is_zero(b)) return infinity(minus);
  if (is_zero(a) || !is_finite(b)) return zero(minus);
  const Parts p = normal_parts(a), q = normal_parts(b);
  const ulong numerator = p.m << 38, whole = numerator / q.m;
  return packed(minus, (whole << 1) | (whole * q.m != numerator ? 1 : 0), p.e - q.e - 39);
}

// --- storage ---------------------------------------------------------------------------------------------------------
inline float widen(float x) { return x; }

inline float widen(half x) {
  const uint bits = as_type<ushort>(x), sign = (bits & 0x8000u) << 16, field = (bits >> 10) & 31u, m = bits & 0x3FFu;
  if (field == 31) return as_float(int(sign | INFINITE | (m << 13)));
  if (field == 0) return packed(sign != 0, m, -24);
  return as_float(int(sign | ((field + 112) << 23) | (m << 13)));
}

inline float widen(bfloat x) { return as_float(int(uint(as_type<ushort>(x)) << 16)); }

inline ushort half_bits(float x) {
  const uint bits = magnitude(x), sign = is_negative(x) ? 0x8000u : 0u;
  if (bits > INFINITE) return 0x7E00;
  if (bits >= 0x47800000u) return ushort(sign | 0x7C00u);
  if (bits < 0x38800000u) return ushort(sign | uint(scaled_integer(as_float(int(bits)), 24)));
  return ushort(sign | ((bits - 0x38000000u + 0xFFFu + ((bits >> 13) & 1u)) >> 13));
}

inline ushort bfloat_bits(float x) {
  const uint bits = as_type<uint>(x);
  return is_nan(x) ? ushort(0x7FC0) : ushort((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline void store(device float* to, long at, float x) { to[at] = is_nan(x) ? canonical_nan() : x; }
inline void store(device half* to, long at, float x) { to[at] = as_type<half>(half_bits(x)); }
inline void store(device bfloat* to, long at, float x) { to[at] = as_type<bfloat>(bfloat_bits(x)); }

// --- exp and log (rule 6) --------------------------------------------------------------------------------------------
// exp(d) = (s + t) * 2^k
struct Exponential {
  float s, t;
  int k;
};

inline Exponential exp_parts(float d) {
  const float z = fma(d, LOG2E, MAGIC), k = z - MAGIC;
  const float r = fma(k, -LN2, d), w = k * -LN2_REST;
  const float g = r + w, square = g * g;
  const float p = fma(fma(EXP_4, square, fma(EXP_3, g, EXP_2)), square, fma(EXP_1, g, EXP_0));
  const float t = fma(square, p, w);
  Exponential e;
  e.s = 1.0f + r;
  e.t = ((1.0f - e.s) + r) + t;
  e.k = as_int(z) - as_int(MAGIC);
  return e;
}

inline float exponential(float x) {
  if (is_nan(x)) return x;
  const float above = x > EXP_FLOOR ? x : EXP_FLOOR;
  const Exponential e = exp_parts(above < EXP_CEIL ? above : EXP_CEIL);
  const int first = e.k >> 1;
  return times((e.s + e.t) * pow2(first), pow2(e.k - first));
}

// 2^t for |t - rint(t)| <= 1/2, times 2^scale, where that is a normal number or infinity
inline float exp2_short(float t, int scale) {
  const float k = (t + MAGIC) - MAGIC, f = t - k;
  const float p = fma(fma(fma(fma(EXP2_3, f, EXP2_2), f, EXP2_1), f, EXP2_0), f, 1.0f);
  return as_float(as_int(p) + ((int(k) + scale) << 23));
}

// 2^30 * exp(d) for d <= 0, for results of 16 bits
inline float exponential_short(float d) {
  const float t = d * LOG2E;
  return exp2_short(t > SHORT_LEAST ? t : SHORT_LEAST, SHORT_BITS);
}

// exp(x) for results of 16 bits: zero instead of subnormal numbers
inline float exponential_short_any(float x) {
  if (is_nan(x)) return x;
  const float t = x * LOG2E;
  if (t < SHORT_LOW) return 0.0f;
  return exp2_short(t < SHORT_HIGH ? t : SHORT_HIGH, 0);
}

struct Pair {
  float high, low;
};

inline Pair two_sum(float a, float b) {
  const float s = a + b, t = s - a;
  Pair p;
  p.high = s;
  p.low = (a - (s - t)) + (b - t);
  return p;
}

// log((1 + f) * 2^k) + low
inline Pair log_core(float f, float k, float low) {
  const float s = quotient(f, 2.0f + f), z = s * s, h = 0.5f * f * f;
  const float r = z * fma(fma(fma(LOG_3, z, LOG_2), z, LOG_1), z, LOG_0);
  const float rest = fma(s, h + r, fma(k, LN2_LO, low)) - h;
  const float a = k * LN2_HI, u = a + f;
  const float w = ((a - u) + f) + rest;
  Pair p;
  p.high = u + w;
  p.low = (u - p.high) + w;
  return p;
}

// x = (1 + f) * 2^k with sqrt(1/2) <= 1 + f < sqrt(2), for positive normal x
struct Split {
  float f, k;
};

inline Split split_exponent(float x) {
  const int b = as_int(x) - SQRT_HALF_BITS;
  Split s;
  s.f = as_float((b & 0x007FFFFF) + SQRT_HALF_BITS) - 1.0f;
  s.k = float(b >> 23);
  return s;
}

// The natural logarithm: -inf at 0, NaN below
inline float logarithm(float x) {
  if (is_zero(x)) return infinity(true);
  if (is_nan(x) || is_negative(x)) return canonical_nan();
  if (!is_finite(x)) return x;
  const Parts p = normal_parts(x);  // a subnormal number becomes a normal one, with its exponent apart
  const int shift = is_subnormal(x) ? 32 : 0;
  const Split s = split_exponent(packed(false, p.m, p.e + shift));
  return log_core(s.f, s.k - float(shift), 0.0f).high;
}

// log(1 + x + low) for finite x > -1 and low far below x
inline Pair log1p_pair(float x, float low) {
  const Pair u = two_sum(1.0f, x);
  const Split s = split_exponent(u.high);
  const bool near = x > LOG1P_LOW && x < LOG1P_HIGH;
  return log_core(near ? x : s.f, near ? 0.0f : s.k, quotient(near ? low : u.low + low, u.high));
}

}  // namespace isograd
