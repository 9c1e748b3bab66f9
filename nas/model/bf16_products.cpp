// Products of bf16 matrices with fp32 results, by the instruction that adds two products to each of 16 fp32 sums.
//
// An operand is packed in panels of a few lanes, rows of the left or columns of the right matrix. A panel stores pairs
// of neighbouring numbers along the depth, one pair of each lane after the other, and pads with zeros.

#include <algorithm>
#include <cstdint>
#include <vector>

#include <immintrin.h>
#include <omp.h>

namespace {

constexpr int VECTOR = 16;             // pairs, or fp32 sums, in a register
constexpr int ROWS = 8, VECTORS = 3;   // of the results that stay in registers
constexpr int COLUMNS = VECTORS * VECTOR;

}  // namespace

// A lane's numbers along the depth are adjacent, or the numbers of neighbouring lanes are; steps count numbers.
struct Matrix {
    const uint16_t* data;
    int64_t lane_step, depth_step;
};

namespace {

inline __mmask16 first(int64_t count) { return count >= VECTOR ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

// Transposes 16 x 16 pairs.
inline void transpose(__m512i (&pairs)[VECTOR]) {
    __m512i other[VECTOR];
    for (int i = 0; i < VECTOR; i += 2) {
        other[i] = _mm512_unpacklo_epi32(pairs[i], pairs[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(pairs[i], pairs[i + 1]);
    }
    for (int i = 0; i < VECTOR; i += 4)
        for (int half = 0; half < 2; half++) {
            pairs[i + 2 * half] = _mm512_unpacklo_epi64(other[i + half], other[i + half + 2]);
            pairs[i + 2 * half + 1] = _mm512_unpackhi_epi64(other[i + half], other[i + half + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            const __m512i left = pairs[8 * half + i], right = pairs[8 * half + i + 4];
            other[8 * half + i] = _mm512_shuffle_i32x4(left, right, 0x88);
            other[8 * half + i + 4] = _mm512_shuffle_i32x4(left, right, 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        pairs[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
        pairs[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    }
}

// Reads 16 lanes at 32 places of the depth as 16 vectors of pairs; what is beyond `lanes` and `depth` becomes 0.
inline void read(const Matrix& from, int64_t lane, int64_t at, int64_t lanes, int64_t depth, __m512i (&pairs)[VECTOR]) {
    const uint16_t* data = from.data + lane * from.lane_step + at * from.depth_step;
    lanes -= lane, depth -= at;
    if (from.depth_step == 1) {
        const __mmask32 known = first(depth) | __mmask32(first(depth - VECTOR)) << VECTOR;
        for (int i = 0; i < VECTOR; i++)
            pairs[i] = i < lanes ? _mm512_maskz_loadu_epi16(known, data + i * from.lane_step) : _mm512_setzero_si512();
        transpose(pairs);
    } else {
        const auto row = [&](int64_t i) {
            const __mmask16 known = i < depth ? first(lanes) : 0;
            return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(known, data + i * from.depth_step));
        };
        for (int i = 0; i < VECTOR; i++) pairs[i] = _mm512_or_si512(row(2 * i), _mm512_slli_epi32(row(2 * i + 1), 16));
    }
}

inline int64_t panels(int64_t lanes, int64_t width) { return (lanes + width - 1) / width; }
inline int64_t padded(int64_t depth) { return panels(depth, 2 * VECTOR) * VECTOR; }  // pairs along the depth

// Packs lanes from `lane` on into panels of WIDTH lanes, as many as `count` lanes need.
template <int WIDTH>
void pack(const Matrix& from, int64_t lane, int64_t count, int64_t lanes, int64_t depth, int32_t* to) {
    constexpr int STEP = std::min(WIDTH, VECTOR);
    for (int64_t l = 0; l < panels(count, WIDTH) * WIDTH; l += VECTOR)
        for (int64_t p = 0; p < padded(depth); p += VECTOR) {
            __m512i pairs[VECTOR];
            read(from, lane + l, 2 * p, lanes, depth, pairs);
            for (int i = 0; i < VECTOR; i++)
                for (int part = 0; part < VECTOR; part += STEP) {
                    const int64_t panel = (l + part) / WIDTH, within = (l + part) % WIDTH;
                    if (panel >= panels(count, WIDTH)) continue;
                    int32_t* at = to + (panel * padded(depth) + p + i) * WIDTH + within;
                    if (STEP == VECTOR)
                        _mm512_storeu_si512(at, pairs[i]);
                    else
                        _mm256_storeu_si256(reinterpret_cast<__m256i*>(at),
                                            part ? _mm512_extracti64x4_epi64(pairs[i], 1)
                                                 : _mm512_castsi512_si256(pairs[i]));
                }
        }
}

// total (rows x columns of a panel each) = kept * total + left x right.
void multiply_panels(const int32_t* left, const int32_t* right, int64_t num_pairs, int64_t rows, int64_t columns,
                     float kept, float* total, int64_t total_step) {
    __m512 sums[ROWS][VECTORS] = {};
    for (int64_t p = 0; p < num_pairs; p++) {
        __m512bh factors[VECTORS];
        for (int n = 0; n < VECTORS; n++)
            factors[n] = (__m512bh)_mm512_loadu_si512(right + p * COLUMNS + n * VECTOR);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const __m512bh row = (__m512bh)_mm512_set1_epi32(left[p * ROWS + m]);
            for (int n = 0; n < VECTORS; n++) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], row, factors[n]);
        }
    }
    for (int m = 0; m < std::min<int64_t>(ROWS, rows); m++)
        for (int n = 0; n < VECTORS; n++) {
            float* at = total + m * total_step + n * VECTOR;
            const __mmask16 known = first(columns - n * VECTOR);
            if (kept != 0.0f)
                sums[m][n] += kept * _mm512_maskz_loadu_ps(known, at);
            _mm512_mask_storeu_ps(at, known, sums[m][n]);
        }
}

}  // namespace

// total (rows x columns, rows `total_step` apart) = kept * total + left (rows x depth) x right (depth x columns).
// The smaller operand is packed as a whole, the panels of the other one by one.
extern "C" void multiply(Matrix left, Matrix right, int64_t rows, int64_t columns, int64_t depth, float kept,
                         float* total, int64_t total_step, int num_threads) {
    const int64_t num_pairs = padded(depth), high = panels(rows, ROWS), wide = panels(columns, COLUMNS);
    const bool packs_left = rows <= columns;
    std::vector<int32_t> shared((packs_left ? high * ROWS : wide * COLUMNS) * num_pairs);
    if (packs_left)
        pack<ROWS>(left, 0, rows, rows, depth, shared.data());
    else
        pack<COLUMNS>(right, 0, columns, columns, depth, shared.data());
#pragma omp parallel num_threads(num_threads)
    {
        std::vector<int32_t> own((packs_left ? COLUMNS : 2 * ROWS) * num_pairs);
        const auto block = [&](int64_t m, int64_t n, const int32_t* of_left, const int32_t* of_right) {
            multiply_panels(of_left, of_right, num_pairs, rows - m, columns - n, kept, total + m * total_step + n,
                            total_step);
        };
        if (packs_left) {
#pragma omp for
            for (int64_t w = 0; w < wide; w++) {
                pack<COLUMNS>(right, w * COLUMNS, COLUMNS, columns, depth, own.data());
                for (int64_t h = 0; h < high; h++)
                    block(h * ROWS, w * COLUMNS, shared.data() + h * ROWS * num_pairs, own.data());
            }
        } else {
#pragma omp for
            for (int64_t h = 0; h < panels(rows, 2 * ROWS); h++) {
                pack<ROWS>(left, h * 2 * ROWS, 2 * ROWS, rows, depth, own.data());
                for (int64_t w = 0; w < wide; w++)
                    for (int half = 0; half < 2; half++)
                        block(h * 2 * ROWS + half * ROWS, w * COLUMNS, own.data() + half * ROWS * num_pairs,
                              shared.data() + w * COLUMNS * num_pairs);
            }
        }
    }
}
