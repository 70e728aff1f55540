// The fused router in Metal: one threadgroup a token, its experts' keys or gradients in threadgroup memory. Formulas:
// reference.py.
#include "isograd/rows/metal_rows.h"

namespace isograd {

constant constexpr int NOT_KEPT = INT_LEAST;  // below the key of every number

// --- scores ----------------------------------------------------------------------------------------------------------
inline float sigmoid(float x) {
  const float z = exponential(as_float(as_int(x) | INT_LEAST)), d = 1.0f + z;
  return quotient(is_negative(x) ? z : 1.0f, d);
}

// The scores of a token: its softmax as in float32 whatever the logits' type, or sigmoids
template <typename X>
struct Scores {
  X logits;
  long step;
  bool softmax;
  Row row;
  Pair r;
  float at(long e) const {
    const float x = widen(logits[e * step]);
    const float s = !softmax ? sigmoid(x) : row.valid ? quotient_of(x, row, r, false) : canonical_nan();
    return is_nan(s) ? canonical_nan() : s;
  }
};

template <typename X>
Scores<X> scores_of(X logits, long step, long experts, bool softmax, uint lane, uint threads, threadgroup long* part) {
  Scores<X> s;
  s.logits = logits;
  s.step = step;
  s.softmax = softmax;
  s.row = row_of(INT_LEAST, false);
  s.r.high = s.r.low = 0.0f;
  if (softmax) {
    s.row = row_of(row_key(logits, step, experts, lane, threads, part), false);
    s.r = reciprocal(exponential_sum(logits, step, experts, s.row, false, lane, threads, part), experts, false);
  }
  return s;
}

// Integers in the order of top_k, equal for the two zeros
inline int selection_key(float x) { return is_zero(x) ? 0 : max_key(x); }

// How many elements come before one: those that are larger, and equal ones at a lower place
inline long rank_of(threadgroup const int* keys, long n, long i) {
  const int key = keys[i];
  long rank = 0;
  for (long j = 0; j < n; j++) rank += keys[j] > key || (keys[j] == key && j < i) ? 1 : 0;
  return rank;
}

// A group's key: that of the sum of its two largest selection scores, whose keys are `keys`
template <typename X, typename B>
int group_key(Scores<X> scores, B bias, long bias_step, bool has_bias, threadgroup const int* keys, long first,
              long members) {
  long best = first, second = -1;
  for (long e = first + 1; e < first + members; e++) {
    if (keys[e] > keys[best]) {
      second = best;
      best = e;
    } else if (second < 0 || keys[e] > keys[second]) {
      second = e;
    }
  }
  const float a = scores.at(best), b = second < 0 ? 0.0f : scores.at(second);
  const float c = has_bias ? plus(a, bias[best * bias_step]) : a;
  if (second < 0) return selection_key(c);
  return selection_key(plus(c, has_bias ? plus(b, bias[second * bias_step]) : b));
}

// --- weights ---------------------------------------------------------------------------------------------------------
// The scores at a token's k experts
template <typename X, typename I>
struct Chosen {
  Scores<X> scores;
  I experts;
  long step;
  float at(long i) const { return scores.at(long(experts[i * step])); }
};

// What divides by the sum of the chosen scores; 0 where that is 0
inline float share(float x, float total) { return is_zero(total) ? 0.0f : quotient(x, total); }

// The terms of the sum in the gradient of renormalized weights
template <typename C, typename G>
struct ShareTerms {
  C chosen;
  float total;
  G gradients;
  long step;
  float scale;
  bool scaled;
  float gradient(long i) const {
    const float g = gradients[i * step];
    return scaled ? times(g, scale) : g;
  }
  float at(long i) const { return times(gradient(i), share(chosen.at(i), total)); }
};

// The terms of softmax's gradient: s * dy over all experts
template <typename X>
struct RouterTerms {
  Scores<X> scores;
  threadgroup const float* dy;
  float at(long e) const { return times(scores.at(e), dy[e]); }
};

// --- a token ---------------------------------------------------------------------------------------------------------
constant constexpr int MOST_EXPERTS = 4096;
constant constexpr int MOST_CHOICES = 1024;  // groups of experts
constant constexpr int ONE_BITS = 0x3F800000;

struct Routing {
  long experts, k, choices, chosen_choices;
  bool softmax, renormalize, has_bias;
  int scale_bits;
};

// The experts of a token and their weights; keys and choice_keys are scratch memory of the group
template <typename X, typename B, typename W, typename E>
void route_token(X logits, long logit_step, B bias, long bias_step, W weights, long weight_step, E chosen,
                 long chosen_step, Routing routing, uint lane, uint threads, threadgroup int* keys,
                 threadgroup int* choice_keys, threadgroup long* part) {
  const long n = routing.experts, k = routing.k, choices = routing.choices, members = n / choices;
  const Scores<X> scores = scores_of(logits, logit_step, n, routing.softmax, lane, threads, part);
  for (long e = lane; e < n; e += threads) {
    const float s = scores.at(e);
    keys[e] = selection_key(routing.has_bias ? plus(s, bias[e * bias_step]) : s);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (choices > 1) {
    for (long g = lane; g < choices; g += threads) {
      choice_keys[g] = group_key(scores, bias, bias_step, routing.has_bias, keys, g * members, members);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (long g = lane; g < choices; g += threads) {
      if (rank_of(choice_keys, choices, g) < routing.chosen_choices) continue;
      for (long e = g * members; e < (g + 1) * members; e++) keys[e] = NOT_KEPT;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (long e = lane; e < n; e += threads) {
    const long place = rank_of(keys, n, e);
    if (place < k) chosen[place * chosen_step] = e;
  }
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  Chosen<X, E> terms;
  terms.scores = scores;
  terms.experts = chosen;
  terms.step = chosen_step;
  float total = 0.0f;
  if (routing.renormalize) total = order_free_sum(terms, k, lane, threads, part);
  const float scale = as_float(routing.scale_bits);
  for (long i = lane; i < k; i += threads) {
    const float w = routing.renormalize ? share(terms.at(i), total) : terms.at(i);
    store(weights, i * weight_step, routing.scale_bits == ONE_BITS ? w : times(w, scale));
  }
}

// The gradient of a token's logits; dy and is_chosen are scratch memory of the group
template <typename G, typename X, typename E, typename D>
void route_token_backward(G dweights, long gradient_step, X logits, long logit_step, E chosen, long chosen_step,
                          D dlogits, long result_step, Routing routing, device long* flag, long code, long position,
                          uint lane, uint threads, threadgroup float* dy, threadgroup uchar* is_chosen,
                          threadgroup long* part) {
  const long n = routing.experts, k = routing.k;
  int outside = 0;
  for (long i = lane; i < k; i += threads) {
    const long e = long(chosen[i * chosen_step]);
    if (e < 0 || e >= n) {
      outside = 1;
      report(flag, code, position + i, e, n);
    }
  }
  if (reduced_max(outside, lane, threads, part) != 0) {
    for (long e = lane; e < n; e += threads) store(dlogits, e * result_step, canonical_nan());
    return;
  }
  ShareTerms<Chosen<X, E>, G> terms;
  terms.chosen.scores = scores_of(logits, logit_step, n, routing.softmax, lane, threads, part);
  terms.chosen.experts = chosen;
  terms.chosen.step = chosen_step;
  terms.total = 0.0f;
  terms.gradients = dweights;
  terms.step = gradient_step;
  terms.scale = as_float(routing.scale_bits);
  terms.scaled = routing.scale_bits != ONE_BITS;
  float mean = 0.0f;
  if (routing.renormalize) {
    terms.total = order_free_sum(terms.chosen, k, lane, threads, part);
    mean = order_free_sum(terms, k, lane, threads, part);
  }
  for (long e = lane; e < n; e += threads) {
    dy[e] = 0.0f;
    is_chosen[e] = 0;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (long i = lane; i < k; i += threads) {
    const long e = long(chosen[i * chosen_step]);
    bool last = true;  // should an expert occur twice, its last occurrence counts
    for (long j = i + 1; j < k; j++) last = last && long(chosen[j * chosen_step]) != e;
    if (!last) continue;
    const float g = terms.gradient(i);
    dy[e] = routing.renormalize ? share(plus(g, negative(mean)), terms.total) : g;
    is_chosen[e] = 1;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  RouterTerms<X> products;
  products.scores = terms.chosen.scores;
  products.dy = dy;
  float sum = 0.0f;
  if (routing.softmax) sum = order_free_sum(products, n, lane, threads, part);
  for (long e = lane; e < n; e += threads) {
    const float s = products.scores.at(e);
    float v = 0.0f;
    if (routing.softmax) {
      v = times(s, plus(dy[e], negative(sum)));
    } else if (is_chosen[e] != 0) {
      v = times(products.at(e), plus(1.0f, negative(s)));
    }
    store(dlogits, e * result_step, v);
  }
}

}  // namespace isograd

// --- entry points ----------------------------------------------------------------------------------------------------
// layout: tokens, experts, k, groups, chosen groups, softmax, renormalize, has_bias, bits of the scale, the bias's
// stride, rank of the tokens, their sizes, and for logits, weights and experts the stride along the last axis and along
// the others
template <typename T>
[[kernel]] void route(device const T* logits [[buffer(0)]], device const float* bias [[buffer(1)]],
                      device float* weights [[buffer(2)]], device long* experts [[buffer(3)]],
                      constant long* layout [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                      uint groups [[threadgroups_per_grid]], uint lane [[thread_position_in_threadgroup]],
                      uint threads [[threads_per_threadgroup]]) {
  threadgroup int keys[isograd::MOST_EXPERTS];
  threadgroup int choice_keys[isograd::MOST_CHOICES];
  threadgroup long part[512];
  isograd::Routing routing;
  routing.experts = layout[1];
  routing.k = layout[2];
  routing.choices = layout[3];
  routing.chosen_choices = layout[4];
  routing.softmax = layout[5] != 0;
  routing.renormalize = layout[6] != 0;
  routing.has_bias = layout[7] != 0;
  routing.scale_bits = int(layout[8]);
  const int rank = int(layout[10]);
  constant long* shape = layout + 11;
  constant long* logit_strides = shape + rank;
  constant long* weight_strides = logit_strides + rank + 1;
  constant long* expert_strides = weight_strides + rank + 1;
  for (long token = group; token < layout[0]; token += groups) {
    isograd::route_token(logits + isograd::row_offset(token, rank, shape, logit_strides + 1), logit_strides[0], bias,
                         layout[9], weights + isograd::row_offset(token, rank, shape, weight_strides + 1),
                         weight_strides[0], experts + isograd::row_offset(token, rank, shape, expert_strides + 1),
                         expert_strides[0], routing, lane, threads, keys, choice_keys, part);
  }
}

// layout: tokens, experts, k, softmax, renormalize, bits of the scale, code of the fault, rank of the tokens, their
// sizes, and for dweights, logits, experts and dlogits the stride along the last axis and along the others
template <typename T, typename I>
[[kernel]] void route_backward(device const float* dweights [[buffer(0)]], device const T* logits [[buffer(1)]],
                               device const I* experts [[buffer(2)]], device T* dlogits [[buffer(3)]],
                               constant long* layout [[buffer(4)]], device long* flag [[buffer(5)]],
                               uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
                               uint lane [[thread_position_in_threadgroup]],
                               uint threads [[threads_per_threadgroup]]) {
  threadgroup float dy[isograd::MOST_EXPERTS];
  threadgroup uchar is_chosen[isograd::MOST_EXPERTS];
  threadgroup long part[512];
  isograd::Routing routing;
  routing.experts = layout[1];
  routing.k = layout[2];
  routing.softmax = layout[3] != 0;
  routing.renormalize = layout[4] != 0;
  routing.scale_bits = int(layout[5]);
  const int rank = int(layout[7]);
  constant long* shape = layout + 8;
  constant long* gradient_strides = shape + rank;
  constant long* logit_strides = gradient_strides + rank + 1;
  constant long* expert_strides = logit_strides + rank + 1;
  constant long* result_strides = expert_strides + rank + 1;
  for (long token = group; token < layout[0]; token += groups) {
    isograd::route_token_backward(
        dweights + isograd::row_offset(token, rank, shape, gradient_strides + 1), gradient_strides[0],
        logits + isograd::row_offset(token, rank, shape, logit_strides + 1), logit_strides[0],
        experts + isograd::row_offset(token, rank, shape, expert_strides + 1), expert_strides[0],
        dlogits + isograd::row_offset(token, rank, shape, result_strides + 1), result_strides[0], routing, flag,
        layout[6], token * routing.k, lane, threads, dy, is_chosen, part);
  }
}

template [[host_name("route_float32")]] [[kernel]]
decltype(route<float>) route<float>;
template [[host_name("route_float16")]] [[kernel]]
decltype(route<half>) route<half>;
template [[host_name("route_bfloat16")]] [[kernel]]
decltype(route<bfloat>) route<bfloat>;
template [[host_name("route_backward_float32_int32")]] [[kernel]]
decltype(route_backward<float, int>) route_backward<float, int>;
template [[host_name("route_backward_float32_int64")]] [[kernel]]
decltype(route_backward<float, long>) route_backward<float, long>;
template [[host_name("route_backward_float32_uint32")]] [[kernel]]
decltype(route_backward<float, uint>) route_backward<float, uint>;
template [[host_name("route_backward_float16_int32")]] [[kernel]]
decltype(route_backward<half, int>) route_backward<half, int>;
template [[host_name("route_backward_float16_int64")]] [[kernel]]
decltype(route_backward<half, long>) route_backward<half, long>;
template [[host_name("route_backward_float16_uint32")]] [[kernel]]
decltype(route_backward<half, uint>) route_backward<half, uint>;
template [[host_name("route_backward_bfloat16_int32")]] [[kernel]]
decltype(route_backward<bfloat, int>) route_backward<bfloat, int>;
template [[host_name("route_backward_bfloat16_int64")]] [[kernel]]
decltype(route_backward<bfloat, long>) route_backward<bfloat, long>;
template [[host_name("route_backward_bfloat16_uint32")]] [[kernel]]
decltype(route_backward<bfloat, uint>) route_backward<bfloat, uint>;
