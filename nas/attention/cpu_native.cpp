// Causal attention with entropy, forward and backward, for heads of HEAD_DIM features, by softmax or a function that
// replaces its exponential; cpu_native.py has the formulas.
//
// Threads share the heads. A head is processed in tiles of TILE query rows, one per lane: scores, weights and gradients
// of scores are stored keys x TILE. All products use `multiply`, whose results stay in registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <omp.h>

#if defined(__AVX512F__)
#define TILE 16
#elif defined(__AVX2__) || defined(__ARM_NEON)
#define TILE 8
#else
#error "attention wants a processor with AVX2 or NEON."
#endif

namespace {

enum Form { SOFTMAX, SQUARE, EIGHTH_POWER, RELU };  // in the order of FORMS in cpu_native.py

constexpr int STRIP = 8;  // rows of a product's results, WIDE registers each
constexpr int WIDE = TILE > 8 ? 2 : 1;
constexpr int KEY_BLOCK = 128;    // keys whose gradients the backward pass keeps in the cache
constexpr float HIDDEN = -1e37f;  // score of a later key, below any other; finite, because 0 * inf is NaN

typedef float Rows __attribute__((vector_size(TILE * sizeof(float))));
typedef float Features __attribute__((vector_size((HEAD_DIM <= 8 ? 8 : TILE) * sizeof(float))));
typedef int32_t Whole __attribute__((vector_size(TILE * sizeof(float))));

template <class Floats = Rows>
inline Floats load(const float* at) {
    Floats value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <class Floats>
inline void store(float* at, Floats value) {
    std::memcpy(at, &value, sizeof value);
}

template <class Floats>
constexpr int LANES = sizeof(Floats) / sizeof(float);

constexpr int WIDTH = (HEAD_DIM + LANES<Features> - 1) / LANES<Features> * LANES<Features>;  // of a row, with padding

// result[i][n] = (or +=) the sum over d < depth of left[i * left_row + d * left_step] * right[d * right_row + n], for
// i < STRIP and n over COUNT registers.
template <bool ADDS, class Floats, int COUNT>
inline void multiply(const float* left, int left_row, int left_step, const float* right, int right_row, int depth,
                     float* result, int result_row) {
    Floats sums[STRIP][COUNT] = {};
    if (ADDS)
        for (int i = 0; i < STRIP; i++)
            for (int n = 0; n < COUNT; n++) sums[i][n] = load<Floats>(result + i * result_row + n * LANES<Floats>);
    for (int d = 0; d < depth; d++) {
        Floats factors[COUNT];
        for (int n = 0; n < COUNT; n++) factors[n] = load<Floats>(right + d * right_row + n * LANES<Floats>);
        for (int i = 0; i < STRIP; i++)
            for (int n = 0; n < COUNT; n++) sums[i][n] += left[i * left_row + d * left_step] * factors[n];
    }
    for (int i = 0; i < STRIP; i++)
        for (int n = 0; n < COUNT; n++) store(result + i * result_row + n * LANES<Floats>, sums[i][n]);
}

// result (num_keys x TILE) = left (num_keys x WIDTH) times across (HEAD_DIM x TILE).
inline void project(const float* left, const float* across, int num_keys, float* result) {
    for (int j = 0; j < num_keys; j += STRIP)
        multiply<false, Rows, 1>(left + j * WIDTH, WIDTH, 1, across, TILE, HEAD_DIM, result + j * TILE, TILE);
}

// result (STRIP x WIDTH) += left (STRIP x depth, by its steps) times right (depth x WIDTH).
inline void mix(const float* left, int left_row, int left_step, const float* right, int depth, float* result) {
    constexpr int STEP = WIDE * LANES<Features>;
    int n = 0;
    for (; n + STEP <= WIDTH; n += STEP)
        multiply<true, Features, WIDE>(left, left_row, left_step, right + n, WIDTH, depth, result + n, WIDTH);
    if (n < WIDTH) multiply<true, Features, 1>(left, left_row, left_step, right + n, WIDTH, depth, result + n, WIDTH);
}

// e^x for x <= 0 up to rounding; 0 if that is subnormal. Computed as 2^(n + f) with |f| <= 1/2, where 2^f is the Taylor
// series of e^(f ln 2) up to f^6.
inline Rows exponential(Rows x) {
    const Rows power = x * 1.44269504f;  // log2 e
    const Whole n = __builtin_convertvector(power - 0.5f, Whole);
    const Rows f = power - __builtin_convertvector(n, Rows);
    Rows series = f * 1.54035304e-4f + 1.33335581e-3f;
    series = series * f + 9.61812911e-3f;
    series = series * f + 5.55041087e-2f;
    series = series * f + 2.40226507e-1f;
    series = series * f + 6.93147181e-1f;
    series = series * f + 1.0f;
    const Rows result = series * reinterpret_cast<Rows>((n + 127) << 23);
    return x < -87.3f ? Rows{} : result;
}

// ln x for normal x > 0. With x = 2^n m and m from sqrt(1/2) to sqrt(2), ln m is the series of 2 artanh t up to t^9.
inline Rows logarithm(Rows x) {
    const Whole bits = reinterpret_cast<Whole>(x), n = (bits - 0x3f3504f3) >> 23;
    const Rows m = reinterpret_cast<Rows>(bits - (n << 23)), t = (m - 1.0f) / (m + 1.0f), square = t * t;
    Rows series = square * (2.0f / 9.0f) + 2.0f / 7.0f;
    series = series * square + 2.0f / 5.0f;
    series = series * square + 2.0f / 3.0f;
    series = series * square + 2.0f;
    return series * t + __builtin_convertvector(n, Rows) * 0.693147181f;
}

// A weight before normalisation, its derivative, and its logarithm times `factor`, or 0 for a weight of 0.
template <Form FORM>
struct Positive {
    Rows weight, slope;

    Positive(Rows score, Rows bound) {
        const Rows x = score - bound, square = x * x, fourth = square * square, one = Rows{} + 1.0f;
        weight = FORM == EIGHTH_POWER ? fourth * fourth : FORM == SQUARE ? square : x > 0.0f ? x : Rows{};
        slope = FORM == EIGHTH_POWER ? 8.0f * fourth * square * x : FORM == SQUARE ? 2.0f * x : x > 0.0f ? one : Rows{};
        weight = score == HIDDEN ? Rows{} : weight;
        slope = score == HIDDEN ? Rows{} : slope;
    }

    Rows times_log(Rows factor) const { return weight > 0.0f ? factor * logarithm(weight) : Rows{}; }
};

// Masks a TILE x TILE block on the diagonal: key j is later than the rows before j.
inline void hide_later(float* scores) {
    for (int j = 0; j < TILE; j++) std::fill_n(scores + j * TILE, j, HIDDEN);
}

// Transposes TILE x WIDTH to WIDTH x TILE.
inline void transpose(const float* rows, float* across) {
    for (int i = 0; i < TILE; i++)
        for (int d = 0; d < WIDTH; d++) across[d * TILE + i] = rows[i * WIDTH + d];
}

}  // namespace

// batch x heads x length x HEAD_DIM; steps count numbers, and the step between features is 1.
struct Operand {
    void* data;
    int64_t batch_step, head_step, row_step;
};

struct Shape {
    int64_t batch, num_heads, length;
};

namespace {

// A number as it is in memory; all arithmetic is in fp32.
struct Bfloat16 {
    uint16_t bits;

    Bfloat16& operator=(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, sizeof wide);
        const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
        bits = is_nan ? 0x7fc0 : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);  // to nearest, ties to even
        return *this;
    }

    operator float() const {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
};

// One head of an operand.
template <class Number>
struct Head {
    Number* data;
    int64_t row_step;

    Head(const Operand& all, const Shape& shape, int64_t index)
        : data(static_cast<Number*>(all.data) + index / shape.num_heads * all.batch_step +
               index % shape.num_heads * all.head_step),
          row_step(all.row_step) {}

    Number* row(int i) const { return data + i * row_step; }

    // Reads `count` rows times `scale`, of WIDTH numbers each; does not write those beyond HEAD_DIM.
    void read(int first, int count, float scale, float* to) const {
        for (int i = 0; i < count; i++)
            for (int d = 0; d < HEAD_DIM; d++) to[i * WIDTH + d] = float(row(first + i)[d]) * scale;
    }

    void write(int first, int count, float scale, const float* from) const {
        for (int i = 0; i < count; i++)
            for (int d = 0; d < HEAD_DIM; d++) row(first + i)[d] = from[i * WIDTH + d] * scale;
    }
};

// Workspace of a thread, handed out in pieces. It begins as zeros, and padded features and keys stay zero.
struct Room {
    float* next;
    float* take(size_t size) { return (next += size) - size; }
};

inline int64_t padded_length(int64_t length) { return (length + TILE - 1) / TILE * TILE; }

const float SCALE = 1.0f / std::sqrt(float(HEAD_DIM));

// bound, sum_offset: constants of a head, which softmax ignores.
template <Form FORM, class Number>
void forward_head(Head<Number> q, Head<Number> k, Head<Number> v, float bound, float sum_offset, Head<Number> output,
                  float* row_sum, float* entropy, Room room, int length) {
    const int64_t padded = padded_length(length);
    float *keys = room.take(padded * WIDTH), *values = room.take(padded * WIDTH), *weights = room.take(padded * TILE);
    float *queries = room.take(TILE * WIDTH), *across = room.take(TILE * WIDTH), *sums = room.take(TILE * WIDTH);
    k.read(0, length, 1.0f, keys);
    v.read(0, length, 1.0f, values);
    for (int first = 0; first < length; first += TILE) {
        const int count = std::min(TILE, length - first), seen = first + TILE;
        q.read(first, count, SCALE, queries);
        transpose(queries, across);
        project(keys, across, seen, weights);
        hide_later(weights + first * TILE);
        Rows largest = {}, total = {}, weighted = {};
        if (FORM == SOFTMAX) {
            largest = load(weights);
            for (int j = 1; j < seen; j++) {
                const Rows other = load(weights + j * TILE);
                largest = other > largest ? other : largest;
            }
            for (int j = 0; j < seen; j++) {
                const Rows centred = load(weights + j * TILE) - largest, weight = exponential(centred);
                total += weight;
                weighted += weight * centred;
                store(weights + j * TILE, weight);
            }
        } else {
            if (FORM == EIGHTH_POWER && first == 0) weights[0] = bound + 1.0f;  // a weight of 1
            for (int j = 0; j < seen; j++) {
                const Positive<FORM> positive(load(weights + j * TILE), Rows{} + bound);
                total += positive.weight;
                weighted += positive.times_log(positive.weight);
                store(weights + j * TILE, positive.weight);
            }
        }
        std::fill_n(sums, TILE * WIDTH, 0.0f);
        for (int i = 0; i < TILE; i += STRIP)
            mix(weights + i, 1, TILE, values, seen, sums + i * WIDTH);
        for (int i = 0; i < count; i++) {
            const float log_total = std::log(total[i]);
            row_sum[first + i] = FORM == SOFTMAX ? largest[i] + log_total : total[i];
            entropy[first + i] = FORM == RELU && total[i] == 0.0f ? 0.0f : log_total - weighted[i] / total[i];
            output.write(first + i, 1, 1.0f / (total[i] + sum_offset), sums + i * WIDTH);
        }
    }
}

constexpr int BLOCK = KEY_BLOCK * WIDTH;

// Returns the sum of the gradients of the scores.
template <Form FORM, class Number>
float backward_head(Head<Number> q, Head<Number> k, Head<Number> v, float bound, float sum_offset, Head<Number> output,
                    const float* row_sum, const float* entropy, Head<Number> output_grad, const float* entropy_grad,
                    Head<Number> q_grad, Head<Number> k_grad, Head<Number> v_grad, Room room, int length) {
    const int64_t padded = padded_length(length);
    float *queries = room.take(padded * WIDTH), *queries_across = room.take(padded * WIDTH);
    float *grads = room.take(padded * WIDTH), *grads_across = room.take(padded * WIDTH);
    float *query_grads = room.take(padded * WIDTH);
    float *sums = room.take(padded), *inverse_sums = room.take(padded);
    float *entropy_grads = room.take(padded), *offsets = room.take(padded);
    float *keys = room.take(BLOCK), *values = room.take(BLOCK);
    float *key_grads = room.take(BLOCK), *value_grads = room.take(BLOCK);
    float *weights = room.take(KEY_BLOCK * TILE), *score_grads = room.take(KEY_BLOCK * TILE);
    std::fill_n(query_grads, padded * WIDTH, 0.0f);
    q.read(0, length, SCALE, queries);
    output_grad.read(0, length, 1.0f, grads);
    for (int first = 0; first < length; first += TILE) {
        transpose(queries + first * WIDTH, queries_across + first * WIDTH);
        transpose(grads + first * WIDTH, grads_across + first * WIDTH);
    }
    for (int i = 0; i < length; i++) {
        sums[i] = row_sum[i];
        entropy_grads[i] = entropy_grad[i];
        offsets[i] = FORM == SOFTMAX ? entropy_grad[i] * entropy[i] : 0.0f;
        for (int d = 0; d < HEAD_DIM; d++) offsets[i] += grads[i * WIDTH + d] * float(output.row(i)[d]);
        if (FORM != SOFTMAX) {  // gradients of weights before normalisation
            const bool is_empty = FORM == RELU && row_sum[i] == 0.0f;
            sums[i] = is_empty ? 0.0f : std::log(row_sum[i]) - entropy[i];
            entropy_grads[i] = is_empty ? 0.0f : entropy_grad[i] / row_sum[i];
            inverse_sums[i] = 1.0f / (row_sum[i] + sum_offset);
        }
    }
    Rows total = {};
    for (int start = 0; start < length; start += KEY_BLOCK) {
        const int num_keys = std::min(KEY_BLOCK, length - start);
        k.read(start, num_keys, 1.0f, keys);
        v.read(start, num_keys, 1.0f, values);
        std::fill_n(key_grads, BLOCK, 0.0f);
        std::fill_n(value_grads, BLOCK, 0.0f);
        for (int first = start; first < length; first += TILE) {
            const int seen = std::min(KEY_BLOCK, first + TILE - start);
            const float *row_queries = queries + first * WIDTH, *row_grads = grads + first * WIDTH;
            project(keys, queries_across + first * WIDTH, seen, weights);
            project(values, grads_across + first * WIDTH, seen, score_grads);
            if (first < start + KEY_BLOCK) hide_later(weights + (first - start) * TILE);
            if (FORM == EIGHTH_POWER && start + first == 0) weights[0] = bound + 1.0f;
            const Rows sum = load(sums + first), row_entropy_grad = load(entropy_grads + first);
            const Rows offset = load(offsets + first), inverse_sum = load(inverse_sums + first);
            for (int j = 0; j < seen * TILE; j += TILE) {
                const Rows grad = load(score_grads + j) - offset;
                Rows weight, score_grad;
                if (FORM == SOFTMAX) {
                    const Rows log_weight = load(weights + j) - sum;
                    weight = exponential(log_weight);
                    score_grad = weight * grad - row_entropy_grad * (weight * log_weight);
                } else {
                    const Positive<FORM> positive(load(weights + j), Rows{} + bound);
                    weight = positive.weight * inverse_sum;
                    score_grad = positive.slope * (grad * inverse_sum - positive.times_log(row_entropy_grad) +
                                                   row_entropy_grad * sum);
                    total += score_grad;
                }
                store(weights + j, weight);
                store(score_grads + j, score_grad);
            }
            if (FORM == EIGHTH_POWER && start + first == 0) {  // the only weight of its row
                total[0] -= score_grads[0];
                score_grads[0] = 0.0f;
            }
            for (int i = 0; i < TILE; i += STRIP)
                mix(score_grads + i, 1, TILE, keys, seen, query_grads + (first + i) * WIDTH);
            for (int j = 0; j < seen; j += STRIP) {
                mix(score_grads + j * TILE, TILE, 1, row_queries, TILE, key_grads + j * WIDTH);
                mix(weights + j * TILE, TILE, 1, row_grads, TILE, value_grads + j * WIDTH);
            }
        }
        k_grad.write(start, num_keys, 1.0f, key_grads);
        v_grad.write(start, num_keys, 1.0f, value_grads);
    }
    q_grad.write(0, length, SCALE, query_grads);
    float sum = 0.0f;
    for (int i = 0; i < TILE; i++) sum += total[i];
    return sum;
}

}  // namespace

// Number of floats that a thread needs for heads of this length.
extern "C" int64_t forward_room(int64_t length) {
    return padded_length(length) * (2 * WIDTH + TILE) + 3 * TILE * WIDTH;
}

extern "C" int64_t backward_room(int64_t length) {
    return padded_length(length) * (5 * WIDTH + 4) + 4 * BLOCK + 2 * KEY_BLOCK * TILE;
}

namespace {

template <Form FORM, class Number>
void forward_heads(Shape shape, Operand q, Operand k, Operand v, const float* bounds, float sum_offset, Operand output,
                   float* row_sum, float* entropy, float* room, int num_threads) {
    const int64_t size = forward_room(shape.length);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t h = 0; h < shape.batch * shape.num_heads; h++) {
        const auto head = [&](const Operand& all) { return Head<Number>(all, shape, h); };
        const int64_t at = h * shape.length;
        const Room own{room + omp_get_thread_num() * size};
        forward_head<FORM>(head(q), head(k), head(v), bounds[h % shape.num_heads], sum_offset, head(output),
                           row_sum + at, entropy + at, own, int(shape.length));
    }
}

template <Form FORM, class Number>
void backward_heads(Shape shape, Operand q, Operand k, Operand v, const float* bounds, float sum_offset, Operand output,
                    const float* row_sum, const float* entropy, Operand output_grad, const float* entropy_grad,
                    Operand q_grad, Operand k_grad, Operand v_grad, float* score_grad_sums, float* room,
                    int num_threads) {
    const int64_t size = backward_room(shape.length);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t h = 0; h < shape.batch * shape.num_heads; h++) {
        const auto head = [&](const Operand& all) { return Head<Number>(all, shape, h); };
        const int64_t at = h * shape.length;
        const Room own{room + omp_get_thread_num() * size};
        score_grad_sums[h] = backward_head<FORM>(
            head(q), head(k), head(v), bounds[h % shape.num_heads], sum_offset, head(output), row_sum + at,
            entropy + at, head(output_grad), entropy_grad + at, head(q_grad), head(k_grad), head(v_grad), own,
            int(shape.length));
    }
}

#define BY_FORM(HEADS, NUMBER) \
    {HEADS<SOFTMAX, NUMBER>, HEADS<SQUARE, NUMBER>, HEADS<EIGHTH_POWER, NUMBER>, HEADS<RELU, NUMBER>}

constexpr decltype(&forward_heads<SOFTMAX, float>) FORWARD[2][4] = {BY_FORM(forward_heads, float),
                                                                    BY_FORM(forward_heads, Bfloat16)};
constexpr decltype(&backward_heads<SOFTMAX, float>) BACKWARD[2][4] = {BY_FORM(backward_heads, float),
                                                                      BY_FORM(backward_heads, Bfloat16)};

}  // namespace

// is_bf16: whether operands are Bfloat16 instead of float. form: a Form. bounds: a number per head; sum_offset: what is
// added to a row's sum; both 0 for softmax. row_sum (of softmax its logarithm), entropy and its gradient: batch x heads
// x length, float without gaps. score_grad_sums: batch x heads; 0 for softmax. room: zeros for every thread.
extern "C" void forward(int is_bf16, int form, Shape shape, Operand q, Operand k, Operand v, const float* bounds,
                        float sum_offset, Operand output, float* row_sum, float* entropy, float* room,
                        int num_threads) {
    FORWARD[is_bf16][form](shape, q, k, v, bounds, sum_offset, output, row_sum, entropy, room, num_threads);
}

extern "C" void backward(int is_bf16, int form, Shape shape, Operand q, Operand k, Operand v, const float* bounds,
                         float sum_offset, Operand output, const float* row_sum, const float* entropy,
                         Operand output_grad, const float* entropy_grad, Operand q_grad, Operand k_grad,
                         Operand v_grad, float* score_grad_sums, float* room, int num_threads) {
    BACKWARD[is_bf16][form](shape, q, k, v, bounds, sum_offset, output, row_sum, entropy, output_grad, entropy_grad,
                            q_grad, k_grad, v_grad, score_grad_sums, room, num_threads);
}
