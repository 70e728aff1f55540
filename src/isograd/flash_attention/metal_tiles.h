// What attention's kernels in Metal share: the tiles of matrices that a threadgroup stages, sums over the lanes of a
// simdgroup, and who sees whom. A threadgroup is described in metal_kernels.metal.
#pragma once
#include "isograd/numerics/metal_sums.h"

namespace isograd {

constant constexpr int ROWS = 16, OWN = 2, LANES = 32, PIECE = 64, PITCH = PIECE + 1;
constant constexpr uint GROUP = 256;

// --- matrices --------------------------------------------------------------------------------------------------------
template <typename P>
struct Matrix {
  P data;
  long rows, columns, row_step, column_step;
};

// Head `head` of entry `batch` in an array of four dimensions
template <typename P, typename S>
Matrix<P> matrix_of(P data, S strides, long batch, long head, long rows, long columns) {
  Matrix<P> m;
  m.data = data + batch * strides[0] + head * strides[1];
  m.rows = rows;
  m.columns = columns;
  m.row_step = strides[2];
  m.column_step = strides[3];
  return m;
}

// `count` rows from `first`, columns `column` to `column + PIECE`, zeros beyond the matrix
template <typename P>
void stage(Matrix<P> m, long first, int count, long column, uint thread_index, threadgroup float* tile) {
  for (int i = int(thread_index); i < count * PIECE; i += int(GROUP)) {
    const int row = i / PIECE, at = i % PIECE;
    const bool inside = first + row < m.rows && column + at < m.columns;
    tile[row * PITCH + at] =
        inside ? widen(m.data[(first + row) * m.row_step + (column + at) * m.column_step]) : 0.0f;
  }
}

// A thread's place, and the threadgroup memory of its group
struct Place {
  uint thread_index, lane, simd;
  threadgroup float* own;      // ROWS x PITCH
  threadgroup float* others;   // LANES x PITCH
  threadgroup float* weights;  // ROWS x LANES, for each simdgroup its own two rows
};

// The products of a simdgroup's two rows of `own`, from `row`, and the lane's row of `others`, from `other`
template <typename A, typename B>
void products(Matrix<A> own, long row, Matrix<B> others, long other, Place place, thread float* sums) {
  sums[0] = sums[1] = 0.0f;
  for (long column = 0; column < own.columns; column += PIECE) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage(own, row, ROWS, column, place.thread_index, place.own);
    stage(others, other, LANES, column, place.thread_index, place.others);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const threadgroup float* a = place.own + place.simd * OWN * PITCH;
    const threadgroup float* b = place.others + place.lane * PITCH;
    for (int d = 0; d < PIECE; d++) {
      sums[0] = fma(a[d], b[d], sums[0]);
      sums[1] = fma(a[PITCH + d], b[d], sums[1]);
    }
  }
}

// Adds up weights[row][j] * others[j], first[row] <= j < last[row], for a simdgroup's two rows; a lane has the columns
// that leave the rest `lane` modulo LANES.
template <int PIECES, typename B>
void accumulate(Matrix<B> others, long other, thread const int* first, thread const int* last, Place place,
                thread float (*sums)[2 * PIECES]) {
  for (int piece = 0; piece < PIECES; piece++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage(others, other, LANES, long(piece) * PIECE, place.thread_index, place.others);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = 0; r < OWN; r++) {
      for (int j = first[r]; j < last[r]; j++) {
        const float w = place.weights[(place.simd * OWN + r) * LANES + j];
        const threadgroup float* row = place.others + j * PITCH + place.lane;
        sums[r][2 * piece] = fma(w, row[0], sums[r][2 * piece]);
        sums[r][2 * piece + 1] = fma(w, row[LANES], sums[r][2 * piece + 1]);
      }
    }
  }
}

template <int PIECES, typename P>
void store_row(Matrix<P> m, long row, thread const float* sums, float factor, uint lane) {
  if (row >= m.rows) return;
  for (int i = 0; i < 2 * PIECES; i++) {
    const long column = i * LANES + lane;
    if (column < m.columns) store(m.data, row * m.row_step + column * m.column_step, times(sums[i], factor));
  }
}

// --- lanes -----------------------------------------------------------------------------------------------------------
inline float lane_sum(float x) {
  for (ushort step = 16; step > 0; step >>= 1) x = x + simd_shuffle_xor(x, step);
  return x;
}

inline int lane_max(int key) {
  for (ushort step = 16; step > 0; step >>= 1) key = max(key, simd_shuffle_xor(key, step));
  return key;
}

// --- visibility ------------------------------------------------------------------------------------------------------
struct Problem {
  long batch, heads, kv_heads, q_length, k_length, dim, v_dim;
  bool causal;
  long offset;  // the key that query 0 is level with
  float scale;
};

inline long clamped(long x, long low, long high) { return x < low ? low : x > high ? high : x; }

// Keys that a query sees: all before this one
inline long keys_end(Problem p, long query) {
  return p.causal ? clamped(query + p.offset + 1, 0, p.k_length) : p.k_length;
}

// Queries that see a key: all from this one
inline long queries_begin(Problem p, long key) { return p.causal ? clamped(key - p.offset, 0, p.q_length) : 0; }

}  // namespace isograd
