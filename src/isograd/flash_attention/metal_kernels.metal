// Attention in Metal: forward, the row sums of o * do, dK and dV, and dQ. Causal or full, grouped heads, any strides.
// Formulas: reference.py.
//
// A threadgroup of 8 simdgroups owns ROWS rows of one head, two for each simdgroup, and goes over the other side's rows
// in tiles of 32, one for each lane. Matrices are staged in threadgroup memory in pieces of 64 columns. A row's result
// depends on its own place and on the other side alone, so not on the batch; products are fma chains in float.
#include "isograd/flash_attention/metal_tiles.h"

namespace isograd {

// --- forward ---------------------------------------------------------------------------------------------------------
template <int PIECES, typename Q, typename K, typename V, typename O, typename L>
void forward_tile(Problem p, Matrix<Q> q, Matrix<K> k, Matrix<V> v, Matrix<O> o, L lse, long lse_step, long row,
                  Place place) {
  int key[OWN] = {INT_LEAST, INT_LEAST};
  float total[OWN] = {0.0f, 0.0f}, sums[OWN][2 * PIECES];
  for (int r = 0; r < OWN; r++) {
    for (int i = 0; i < 2 * PIECES; i++) sums[r][i] = 0.0f;
  }
  const long last_row = clamped(row + ROWS - 1, 0, p.q_length - 1), end = keys_end(p, last_row);
  const long mine = row + place.simd * OWN;
  for (long start = 0; start < end; start += LANES) {
    float s[OWN];
    int first[OWN] = {0, 0}, last[OWN];
    products(q, row, k, start, place, s);
    for (int r = 0; r < OWN; r++) {
      last[r] = mine + r < p.q_length ? int(clamped(keys_end(p, mine + r) - start, 0, LANES)) : 0;
      const bool visible = int(place.lane) < last[r];
      const float score = s[r] * p.scale;
      const int top = max(key[r], lane_max(visible ? max_key(score) : INT_LEAST));
      const bool some = visible && as_int(score) != as_int(infinity(true));
      const float w = some ? exponential(score - from_key(top)) : 0.0f;
      const float faded = key[r] == INT_LEAST || key[r] == top ? 1.0f : exponential(from_key(key[r]) - from_key(top));
      total[r] = fma(total[r], faded, lane_sum(w));
      for (int i = 0; i < 2 * PIECES; i++) sums[r][i] = sums[r][i] * faded;
      key[r] = top;
      place.weights[(place.simd * OWN + r) * LANES + place.lane] = w;
    }
    accumulate<PIECES>(v, start, first, last, place, sums);
  }
  for (int r = 0; r < OWN; r++) {
    const bool none = is_zero(total[r]);
    store_row<PIECES>(o, mine + r, sums[r], none ? 0.0f : quotient(1.0f, total[r]), place.lane);
    if (place.lane == 0 && mine + r < p.q_length) {
      store(lse, (mine + r) * lse_step, none ? infinity(true) : from_key(key[r]) + logarithm(total[r]));
    }
  }
}

// --- backward --------------------------------------------------------------------------------------------------------
template <typename O, typename D>
struct DeltaTerms {
  O o;
  long o_step;
  D gradient;
  long gradient_step;
  float at(long j) const { return times(widen(o[j * o_step]), widen(gradient[j * gradient_step])); }
};

// What the backward needs of a query: its lse, and the row sum of o * do less the gradient of lse
template <typename L, typename D>
struct QueryState {
  L lse;
  long lse_step;
  D delta;
  L dlse;
  long dlse_step;
  bool has_dlse;
  float at_lse(long i) const { return lse[i * lse_step]; }
  float at_delta(long i) const { return has_dlse ? delta[i] - dlse[i * dlse_step] : delta[i]; }
};

inline float probability(float score, float lse) {
  return as_int(lse) == as_int(infinity(true)) ? 0.0f : exponential(score - lse);
}

template <int PIECES, typename Q, typename K, typename V, typename G, typename D, typename S>
void query_gradient_tile(Problem p, Matrix<Q> q, Matrix<K> k, Matrix<V> v, Matrix<G> gradient, Matrix<D> dq, S state,
                         long row, Place place) {
  float sums[OWN][2 * PIECES];
  for (int r = 0; r < OWN; r++) {
    for (int i = 0; i < 2 * PIECES; i++) sums[r][i] = 0.0f;
  }
  const long end = keys_end(p, clamped(row + ROWS - 1, 0, p.q_length - 1)), mine = row + place.simd * OWN;
  for (long start = 0; start < end; start += LANES) {
    float s[OWN], dp[OWN];
    int first[OWN] = {0, 0}, last[OWN];
    products(q, row, k, start, place, s);
    products(gradient, row, v, start, place, dp);
    for (int r = 0; r < OWN; r++) {
      const bool inside = mine + r < p.q_length;
      last[r] = inside ? int(clamped(keys_end(p, mine + r) - start, 0, LANES)) : 0;
      float w = 0.0f;
      if (int(place.lane) < last[r]) {
        w = probability(s[r] * p.scale, state.at_lse(mine + r)) * (dp[r] - state.at_delta(mine + r));
      }
      place.weights[(place.simd * OWN + r) * LANES + place.lane] = w;
    }
    accumulate<PIECES>(k, start, first, last, place, sums);
  }
  for (int r = 0; r < OWN; r++) store_row<PIECES>(dq, mine + r, sums[r], p.scale, place.lane);
}

// Adds one query head to the gradients of a tile of keys.
template <int PIECES, typename Q, typename K, typename V, typename G, typename S>
void key_gradient_tile(Problem p, Matrix<Q> q, Matrix<K> k, Matrix<V> v, Matrix<G> gradient, S state, long row,
                       Place place, thread float (*dk)[2 * PIECES], thread float (*dv)[2 * PIECES]) {
  const long mine = row + place.simd * OWN, begin = queries_begin(p, row) / LANES * LANES;
  for (long start = begin; start < p.q_length; start += LANES) {
    float s[OWN], dp[OWN], w[OWN];
    int first[OWN], last[OWN];
    products(k, row, q, start, place, s);
    products(v, row, gradient, start, place, dp);
    const long query = start + place.lane;
    for (int r = 0; r < OWN; r++) {
      first[r] = int(clamped(queries_begin(p, mine + r) - start, 0, LANES));
      last[r] = mine + r < p.k_length ? int(clamped(p.q_length - start, 0, LANES)) : 0;
      w[r] = 0.0f;
      float weight = 0.0f;
      if (int(place.lane) >= first[r] && int(place.lane) < last[r]) {
        weight = probability(s[r] * p.scale, state.at_lse(query));
        w[r] = weight * (dp[r] - state.at_delta(query));
      }
      place.weights[(place.simd * OWN + r) * LANES + place.lane] = weight;
    }
    accumulate<PIECES>(gradient, start, first, last, place, dv);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = 0; r < OWN; r++) place.weights[(place.simd * OWN + r) * LANES + place.lane] = w[r];
    accumulate<PIECES>(q, start, first, last, place, dk);
  }
}

// --- whole problems --------------------------------------------------------------------------------------------------
// layout: batch, heads, heads of k and v, queries, keys, columns of q and k, columns of v, causal, the key that query 0
// is level with, bits of the scale, whether there is a dlse, and the strides of q, k, v, o, do, dq, dk, dv (four each),
// lse and dlse (three each)
constant constexpr int TO_Q = 11, TO_K = 15, TO_V = 19, TO_O = 23, TO_DO = 27, TO_DQ = 31, TO_DK = 35, TO_DV = 39;
constant constexpr int TO_LSE = 43, TO_DLSE = 46;

template <typename P>
Problem problem_of(P layout) {
  Problem p;
  p.batch = layout[0];
  p.heads = layout[1];
  p.kv_heads = layout[2];
  p.q_length = layout[3];
  p.k_length = layout[4];
  p.dim = layout[5];
  p.v_dim = layout[6];
  p.causal = layout[7] != 0;
  p.offset = layout[8];
  p.scale = as_float(int(layout[9]));
  return p;
}

template <int PIECES, typename Q, typename K, typename V, typename O, typename L, typename P>
void attention(Q q, K k, V v, O o, L lse, P layout, uint group, uint groups, Place place) {
  const Problem p = problem_of(layout);
  const long tiles = (p.q_length + ROWS - 1) / ROWS;
  for (long at = group; at < p.batch * p.heads * tiles; at += groups) {
    const long row = at % tiles * ROWS, head = at / tiles % p.heads, batch = at / tiles / p.heads;
    const long kv_head = head / (p.heads / p.kv_heads);
    P lse_strides = layout + TO_LSE;
    forward_tile<PIECES>(p, matrix_of(q, layout + TO_Q, batch, head, p.q_length, p.dim),
                         matrix_of(k, layout + TO_K, batch, kv_head, p.k_length, p.dim),
                         matrix_of(v, layout + TO_V, batch, kv_head, p.k_length, p.v_dim),
                         matrix_of(o, layout + TO_O, batch, head, p.q_length, p.v_dim),
                         lse + batch * lse_strides[0] + head * lse_strides[1], lse_strides[2], row, place);
  }
}

template <typename L, typename D, typename P>
QueryState<L, D> state_of(Problem p, L lse, D delta, L dlse, P layout, long batch, long head) {
  P lse_strides = layout + TO_LSE;
  P dlse_strides = layout + TO_DLSE;
  QueryState<L, D> state;
  state.lse = lse + batch * lse_strides[0] + head * lse_strides[1];
  state.lse_step = lse_strides[2];
  state.delta = delta + (batch * p.heads + head) * p.q_length;
  state.dlse = dlse + batch * dlse_strides[0] + head * dlse_strides[1];
  state.dlse_step = dlse_strides[2];
  state.has_dlse = layout[10] != 0;
  return state;
}

template <int PIECES, typename G, typename Q, typename K, typename V, typename L, typename D, typename O, typename P>
void attention_dq(G gradient, Q q, K k, V v, L lse, D delta, L dlse, O dq, P layout, uint group, uint groups,
                  Place place) {
  const Problem p = problem_of(layout);
  const long tiles = (p.q_length + ROWS - 1) / ROWS;
  for (long at = group; at < p.batch * p.heads * tiles; at += groups) {
    const long row = at % tiles * ROWS, head = at / tiles % p.heads, batch = at / tiles / p.heads;
    const long kv_head = head / (p.heads / p.kv_heads);
    query_gradient_tile<PIECES>(p, matrix_of(q, layout + TO_Q, batch, head, p.q_length, p.dim),
                                matrix_of(k, layout + TO_K, batch, kv_head, p.k_length, p.dim),
                                matrix_of(v, layout + TO_V, batch, kv_head, p.k_length, p.v_dim),
                                matrix_of(gradient, layout + TO_DO, batch, head, p.q_length, p.v_dim),
                                matrix_of(dq, layout + TO_DQ, batch, head, p.q_length, p.dim),
                                state_of(p, lse, delta, dlse, layout, batch, head), row, place);
  }
}

template <int PIECES, typename G, typename Q, typename K, typename V, typename L, typename D, typename O, typename P>
void attention_dk_dv(G gradient, Q q, K k, V v, L lse, D delta, L dlse, O dk, O dv, P layout, uint group, uint groups,
                     Place place) {
  const Problem p = problem_of(layout);
  const long tiles = (p.k_length + ROWS - 1) / ROWS, shared = p.heads / p.kv_heads;
  for (long at = group; at < p.batch * p.kv_heads * tiles; at += groups) {
    const long row = at % tiles * ROWS, kv_head = at / tiles % p.kv_heads, batch = at / tiles / p.kv_heads;
    float dk_sums[OWN][2 * PIECES], dv_sums[OWN][2 * PIECES];
    for (int r = 0; r < OWN; r++) {
      for (int i = 0; i < 2 * PIECES; i++) dk_sums[r][i] = dv_sums[r][i] = 0.0f;
    }
    for (long head = kv_head * shared; head < (kv_head + 1) * shared; head++) {
      key_gradient_tile<PIECES>(p, matrix_of(q, layout + TO_Q, batch, head, p.q_length, p.dim),
                                matrix_of(k, layout + TO_K, batch, kv_head, p.k_length, p.dim),
                                matrix_of(v, layout + TO_V, batch, kv_head, p.k_length, p.v_dim),
                                matrix_of(gradient, layout + TO_DO, batch, head, p.q_length, p.v_dim),
                                state_of(p, lse, delta, dlse, layout, batch, head), row, place, dk_sums, dv_sums);
    }
    const long mine = row + place.simd * OWN;
    for (int r = 0; r < OWN; r++) {
      store_row<PIECES>(matrix_of(dk, layout + TO_DK, batch, kv_head, p.k_length, p.dim), mine + r, dk_sums[r], p.scale,
                        place.lane);
      store_row<PIECES>(matrix_of(dv, layout + TO_DV, batch, kv_head, p.k_length, p.v_dim), mine + r, dv_sums[r], 1.0f,
                        place.lane);
    }
  }
}

// layout: batch, heads, rows, columns, and the strides of o, do (four each) and delta (three)
template <typename O, typename G, typename D, typename P>
void delta_rows(O o, G gradient, D delta, P layout, uint group, uint groups, uint lane, uint threads,
                threadgroup long* part) {
  const long heads = layout[1], length = layout[2];
  P o_strides = layout + 4;
  P gradient_strides = layout + 8;
  P delta_strides = layout + 12;
  for (long at = group; at < layout[0] * heads * length; at += groups) {
    const long row = at % length, head = at / length % heads, batch = at / length / heads;
    DeltaTerms<O, G> terms;
    terms.o = o + batch * o_strides[0] + head * o_strides[1] + row * o_strides[2];
    terms.o_step = o_strides[3];
    terms.gradient = gradient + batch * gradient_strides[0] + head * gradient_strides[1] + row * gradient_strides[2];
    terms.gradient_step = gradient_strides[3];
    const float sum = order_free_sum(terms, layout[3], lane, threads, part);
    if (lane == 0) store(delta, batch * delta_strides[0] + head * delta_strides[1] + row * delta_strides[2], sum);
  }
}

}  // namespace isograd

// --- entry points ----------------------------------------------------------------------------------------------------
template <typename T>
[[kernel]] void attention_delta(device const T* o [[buffer(0)]], device const T* gradient [[buffer(1)]],
                                device float* delta [[buffer(2)]], constant long* layout [[buffer(3)]],
                                uint group [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]],
                                uint lane [[thread_position_in_threadgroup]],
                                uint threads [[threads_per_threadgroup]]) {
  threadgroup long part[512];
  isograd::delta_rows(o, gradient, delta, layout, group, groups, lane, threads, part);
}

template <typename T, int PIECES>
[[kernel]] void attention_forward(device const T* q [[buffer(0)]],
                                  device const T* k [[buffer(1)]],
                                  device const T* v [[buffer(2)]],
                                  device T* o [[buffer(3)]],
                                  device float* lse [[buffer(4)]],
                                  constant long* layout [[buffer(5)]],
                                  uint group [[threadgroup_position_in_grid]],
                                  uint groups [[threadgroups_per_grid]],
                                  uint thread_index [[thread_position_in_threadgroup]],
                                  uint lane [[thread_index_in_simdgroup]],
                                  uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float own[isograd::ROWS * isograd::PITCH];
  threadgroup float others[isograd::LANES * isograd::PITCH];
  threadgroup float weights[isograd::ROWS * isograd::LANES];
  isograd::Place place;
  place.thread_index = thread_index;
  place.lane = lane;
  place.simd = simd;
  place.own = own;
  place.others = others;
  place.weights = weights;
  isograd::attention<PIECES>(q, k, v, o, lse, layout, group, groups, place);
}

template <typename T, int PIECES>
[[kernel]] void attention_query_gradient(device const T* gradient [[buffer(0)]],
                                         device const T* q [[buffer(1)]],
                                         device const T* k [[buffer(2)]],
                                         device const T* v [[buffer(3)]],
                                         device const float* lse [[buffer(4)]],
                                         device const float* delta [[buffer(5)]],
                                         device const float* dlse [[buffer(6)]],
                                         device T* dq [[buffer(7)]],
                                         constant long* layout [[buffer(8)]],
                                         uint group [[threadgroup_position_in_grid]],
                                         uint groups [[threadgroups_per_grid]],
                                         uint thread_index [[thread_position_in_threadgroup]],
                                         uint lane [[thread_index_in_simdgroup]],
                                         uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float own[isograd::ROWS * isograd::PITCH];
  threadgroup float others[isograd::LANES * isograd::PITCH];
  threadgroup float weights[isograd::ROWS * isograd::LANES];
  isograd::Place place;
  place.thread_index = thread_index;
  place.lane = lane;
  place.simd = simd;
  place.own = own;
  place.others = others;
  place.weights = weights;
  isograd::attention_dq<PIECES>(gradient, q, k, v, lse, delta, dlse, dq, layout, group, groups, place);
}

template <typename T, int PIECES>
[[kernel]] void attention_key_gradient(device const T* gradient [[buffer(0)]],
                                       device const T* q [[buffer(1)]],
                                       device const T* k [[buffer(2)]],
                                       device const T* v [[buffer(3)]],
                                       device const float* lse [[buffer(4)]],
                                       device const float* delta [[buffer(5)]],
                                       device const float* dlse [[buffer(6)]],
                                       device T* dk [[buffer(7)]],
                                       device T* dv [[buffer(8)]],
                                       constant long* layout [[buffer(9)]],
                                       uint group [[threadgroup_position_in_grid]],
                                       uint groups [[threadgroups_per_grid]],
                                       uint thread_index [[thread_position_in_threadgroup]],
                                       uint lane [[thread_index_in_simdgroup]],
                                       uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float own[isograd::ROWS * isograd::PITCH];
  threadgroup float others[isograd::LANES * isograd::PITCH];
  threadgroup float weights[isograd::ROWS * isograd::LANES];
  isograd::Place place;
  place.thread_index = thread_index;
  place.lane = lane;
  place.simd = simd;
  place.own = own;
  place.others = others;
  place.weights = weights;
  isograd::attention_dk_dv<PIECES>(gradient, q, k, v, lse, delta, dlse, dk, dv, layout, group, groups, place);
}

template [[host_name("attention_delta_float32")]] [[kernel]]
decltype(attention_delta<float>) attention_delta<float>;
template [[host_name("attention_delta_float16")]] [[kernel]]
decltype(attention_delta<half>) attention_delta<half>;
template [[host_name("attention_delta_bfloat16")]] [[kernel]]
decltype(attention_delta<bfloat>) attention_delta<bfloat>;
template [[host_name("attention_forward_float32_1")]] [[kernel]]
decltype(attention_forward<float, 1>) attention_forward<float, 1>;
template [[host_name("attention_forward_float32_2")]] [[kernel]]
decltype(attention_forward<float, 2>) attention_forward<float, 2>;
template [[host_name("attention_forward_float32_4")]] [[kernel]]
decltype(attention_forward<float, 4>) attention_forward<float, 4>;
template [[host_name("attention_forward_float16_1")]] [[kernel]]
decltype(attention_forward<half, 1>) attention_forward<half, 1>;
template [[host_name("attention_forward_float16_2")]] [[kernel]]
decltype(attention_forward<half, 2>) attention_forward<half, 2>;
template [[host_name("attention_forward_float16_4")]] [[kernel]]
decltype(attention_forward<half, 4>) attention_forward<half, 4>;
template [[host_name("attention_forward_bfloat16_1")]] [[kernel]]
decltype(attention_forward<bfloat, 1>) attention_forward<bfloat, 1>;
template [[host_name("attention_forward_bfloat16_2")]] [[kernel]]
decltype(attention_forward<bfloat, 2>) attention_forward<bfloat, 2>;
template [[host_name("attention_forward_bfloat16_4")]] [[kernel]]
decltype(attention_forward<bfloat, 4>) attention_forward<bfloat, 4>;
template [[host_name("attention_query_gradient_float32_1")]] [[kernel]]
decltype(attention_query_gradient<float, 1>) attention_query_gradient<float, 1>;
template [[host_name("attention_query_gradient_float32_2")]] [[kernel]]
decltype(attention_query_gradient<float, 2>) attention_query_gradient<float, 2>;
template [[host_name("attention_query_gradient_float32_4")]] [[kernel]]
decltype(attention_query_gradient<float, 4>) attention_query_gradient<float, 4>;
template [[host_name("attention_query_gradient_float16_1")]] [[kernel]]
decltype(attention_query_gradient<half, 1>) attention_query_gradient<half, 1>;
template [[host_name("attention_query_gradient_float16_2")]] [[kernel]]
decltype(attention_query_gradient<half, 2>) attention_query_gradient<half, 2>;
template [[host_name("attention_query_gradient_float16_4")]] [[kernel]]
decltype(attention_query_gradient<half, 4>) attention_query_gradient<half, 4>;
template [[host_name("attention_query_gradient_bfloat16_1")]] [[kernel]]
decltype(attention_query_gradient<bfloat, 1>) attention_query_gradient<bfloat, 1>;
template [[host_name("attention_query_gradient_bfloat16_2")]] [[kernel]]
decltype(attention_query_gradient<bfloat, 2>) attention_query_gradient<bfloat, 2>;
template [[host_name("attention_query_gradient_bfloat16_4")]] [[kernel]]
decltype(attention_query_gradient<bfloat, 4>) attention_query_gradient<bfloat, 4>;
template [[host_name("attention_key_gradient_float32_1")]] [[kernel]]
decltype(attention_key_gradient<float, 1>) attention_key_gradient<float, 1>;
template [[host_name("attention_key_gradient_float32_2")]] [[kernel]]
decltype(attention_key_gradient<float, 2>) attention_key_gradient<float, 2>;
template [[host_name("attention_key_gradient_float32_4")]] [[kernel]]
decltype(attention_key_gradient<float, 4>) attention_key_gradient<float, 4>;
template [[host_name("attention_key_gradient_float16_1")]] [[kernel]]
decltype(attention_key_gradient<half, 1>) attention_key_gradient<half, 1>;
template [[host_name("attention_key_gradient_float16_2")]] [[kernel]]
decltype(attention_key_gradient<half, 2>) attention_key_gradient<half, 2>;
template [[host_name("attention_key_gradient_float16_4")]] [[kernel]]
decltype(attention_key_gradient<half, 4>) attention_key_gradient<half, 4>;
template [[host_name("attention_key_gradient_bfloat16_1")]] [[kernel]]
decltype(attention_key_gradient<bfloat, 1>) attention_key_gradient<bfloat, 1>;
template [[host_name("attention_key_gradient_bfloat16_2")]] [[kernel]]
decltype(attention_key_gradient<bfloat, 2>) attention_key_gradient<bfloat, 2>;
template [[host_name("attention_key_gradient_bfloat16_4")]] [[kernel]]
decltype(attention_key_gradient<bfloat, 4>) attention_key_gradient<bfloat, 4>;
