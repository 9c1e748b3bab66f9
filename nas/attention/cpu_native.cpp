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

enum Form { SOFTMAX, SQUARE, EIGHTH_POWER, RELU };  // in the order of FUNCTIONS in cpu_native.py

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

// A weight before it is divided by the row's sum, and its derivative; 0 for hidden keys. bound: subtracted from scores.
template <Form FORM>
struct Unnormalised {
    Rows x, weight, slope;

    Unnormalised(Rows score, Rows bound) : x(score - bound) {
        const Rows square = x * x, fourth = square * square, one = Rows{} + 1.0f;
        if (FORM == SOFTMAX) weight = slope = exponential(x);
        if (FORM == SQUARE) weight = square, slope = 2.0f * x;
        if (FORM == EIGHTH_POWER) weight = fourth * fourth, slope = 8.0f * fourth * square * x;
        if (FORM == RELU) weight = x < 0.0f ? Rows{} : x, slope = x > 0.0f ? one : Rows{};
        weight = score == HIDDEN ? Rows{} : weight;
        slope = score == HIDDEN ? Rows{} : slope;
    }

    // The weight's logarithm times `factor`, or 0 for a weight of 0.
    Rows times_log(Rows factor) const {
        return weight > 0.0f ? factor * (FORM == SOFTMAX ? x : logarithm(weight)) : Rows{};
    }
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

// Arguments of a pass. bounds: a number for each head, which softmax ignores; sum_offset: what is added to a row's sum.
// row_sum (of softmax its logarithm), entropy and its gradient: batch x heads x length, float without gaps.
// score_grad_sums: batch x heads. room: zeros for every thread. A forward pass needs no gradients.
struct Pass {
    int64_t batch, num_heads, length;
    Operand q, k, v, output, output_grad, q_grad, k_grad, v_grad;
    float *bounds, *row_sum, *entropy, *entropy_grad, *score_grad_sums, *room;
    float sum_offset;
    int num_threads;
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

    Head(const Operand& all, const Pass& pass, int64_t index)
        : data(static_cast<Number*>(all.data) + index / pass.num_heads * all.batch_step +
               index % pass.num_heads * all.head_step),
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

// The first token has no other key, and its eighth power may be almost 0: its weight is 1.
template <Form FORM>
inline void set_first_weight(float* scores, float bound) {
    if (FORM == EIGHTH_POWER) scores[0] = bound + 1.0f;
}

// Of each row: what was subtracted from scores, and the sums of unnormalised weights and of each times its logarithm.
struct Sums {
    Rows bound, weights, with_logs;
};

// Replaces scores, seen x TILE, by unnormalised weights.
template <Form FORM>
inline Sums weigh(float* scores, int seen, float bound) {
    Sums sums{FORM == SOFTMAX ? load(scores) : Rows{} + bound, {}, {}};
    for (int j = 1; FORM == SOFTMAX && j < seen; j++) {
        const Rows other = load(scores + j * TILE);
        sums.bound = other > sums.bound ? other : sums.bound;
    }
    for (int j = 0; j < seen; j++) {
        const Unnormalised<FORM> one(load(scores + j * TILE), sums.bound);
        sums.weights += one.weight;
        sums.with_logs += one.times_log(one.weight);
        store(scores + j * TILE, one.weight);
    }
    return sums;
}

template <Form FORM, class Number>
void forward_head(const Pass& pass, int64_t index, Room room) {
    const auto head = [&](const Operand& all) { return Head<Number>(all, pass, index); };
    const Head<Number> q = head(pass.q), k = head(pass.k), v = head(pass.v), output = head(pass.output);
    const int length = int(pass.length);
    const int64_t padded = padded_length(length);
    const float bound = pass.bounds[index % pass.num_heads];
    float *row_sum = pass.row_sum + index * length, *entropy = pass.entropy + index * length;
    float *keys = room.take(padded * WIDTH), *values = room.take(padded * WIDTH), *weights = room.take(padded * TILE);
    float *queries = room.take(TILE * WIDTH), *across = room.take(TILE * WIDTH), *mixed = room.take(TILE * WIDTH);
    k.read(0, length, 1.0f, keys);
    v.read(0, length, 1.0f, values);
    for (int first = 0; first < length; first += TILE) {
        const int count = std::min(TILE, length - first), seen = first + TILE;
        q.read(first, count, SCALE, queries);
        transpose(queries, across);
        project(keys, across, seen, weights);
        hide_later(weights + first * TILE);
        if (first == 0) set_first_weight<FORM>(weights, bound);
        const Sums sums = weigh<FORM>(weights, seen, bound);
        std::fill_n(mixed, TILE * WIDTH, 0.0f);
        for (int i = 0; i < TILE; i += STRIP)
            mix(weights + i, 1, TILE, values, seen, mixed + i * WIDTH);
        for (int i = 0; i < count; i++) {
            const float sum = sums.weights[i], log_sum = std::log(sum);
            row_sum[first + i] = FORM == SOFTMAX ? sums.bound[i] + log_sum : sum;
            entropy[first + i] = FORM == RELU && sum == 0.0f ? 0.0f : log_sum - sums.with_logs[i] / sum;
            output.write(first + i, 1, 1.0f / (sum + pass.sum_offset), mixed + i * WIDTH);
        }
    }
}

constexpr int BLOCK = KEY_BLOCK * WIDTH;

// Constants of the rows in the formula of the scores' gradients: what is subtracted from scores (of softmax, weights are
// then normalised) and from logarithms of weights, the inverse of what divides weights, and factors. 0 for padding.
struct Constants {
    float *bounds, *logs, *inverses, *entropy_grads, *offsets;

    template <Form FORM>
    void set(int i, float bound, float row_sum, float sum_offset, float entropy, float entropy_grad, float offset) {
        const bool is_empty = FORM == RELU && row_sum == 0.0f, is_softmax = FORM == SOFTMAX;
        bounds[i] = is_softmax ? row_sum : bound;
        logs[i] = is_softmax ? -entropy : is_empty ? 0.0f : std::log(row_sum) - entropy;
        inverses[i] = is_softmax ? 1.0f : 1.0f / (row_sum + sum_offset);
        entropy_grads[i] = is_softmax ? entropy_grad : is_empty ? 0.0f : entropy_grad / row_sum;
        offsets[i] = offset;
    }
};

// Replaces scores of the rows from `first` on by weights, and gradients of weights by those of scores, whose sum it
// returns. weights, grads: seen x TILE.
template <Form FORM>
inline Rows differentiate(float* weights, float* grads, int seen, int first, const Constants& constants) {
    const Rows bound = load(constants.bounds + first), log = load(constants.logs + first);
    const Rows inverse = load(constants.inverses + first), offset = load(constants.offsets + first);
    const Rows entropy_grad = load(constants.entropy_grads + first);
    Rows total = {};
    for (int j = 0; j < seen * TILE; j += TILE) {
        const Unnormalised<FORM> one(load(weights + j), bound);
        const Rows grad = (load(grads + j) - offset) * inverse + entropy_grad * log - one.times_log(entropy_grad);
        store(weights + j, one.weight * inverse);
        store(grads + j, one.slope * grad);
        total += one.slope * grad;
    }
    return total;
}

template <Form FORM, class Number>
void backward_head(const Pass& pass, int64_t index, Room room) {
    const auto head = [&](const Operand& all) { return Head<Number>(all, pass, index); };
    const Head<Number> output = head(pass.output);
    const int length = int(pass.length);
    const int64_t padded = padded_length(length), at = index * length;
    const float bound = pass.bounds[index % pass.num_heads];
    float *queries = room.take(padded * WIDTH), *queries_across = room.take(padded * WIDTH);
    float *grads = room.take(padded * WIDTH), *grads_across = room.take(padded * WIDTH);
    float *query_grads = room.take(padded * WIDTH);
    float* rows = room.take(5 * padded);
    Constants constants{rows, rows + padded, rows + 2 * padded, rows + 3 * padded, rows + 4 * padded};
    float *keys = room.take(BLOCK), *values = room.take(BLOCK);
    float *key_grads = room.take(BLOCK), *value_grads = room.take(BLOCK);
    float *weights = room.take(KEY_BLOCK * TILE), *score_grads = room.take(KEY_BLOCK * TILE);
    std::fill_n(query_grads, padded * WIDTH, 0.0f);
    head(pass.q).read(0, length, SCALE, queries);
    head(pass.output_grad).read(0, length, 1.0f, grads);
    for (int first = 0; first < length; first += TILE) {
        transpose(queries + first * WIDTH, queries_across + first * WIDTH);
        transpose(grads + first * WIDTH, grads_across + first * WIDTH);
    }
    for (int i = 0; i < length; i++) {
        float offset = 0.0f;
        for (int d = 0; d < HEAD_DIM; d++) offset += grads[i * WIDTH + d] * float(output.row(i)[d]);
        constants.set<FORM>(i, bound, pass.row_sum[at + i], pass.sum_offset, pass.entropy[at + i],
                            pass.entropy_grad[at + i], offset);
    }
    Rows total = {};
    for (int start = 0; start < length; start += KEY_BLOCK) {
        const int num_keys = std::min(KEY_BLOCK, length - start);
        head(pass.k).read(start, num_keys, 1.0f, keys);
        head(pass.v).read(start, num_keys, 1.0f, values);
        std::fill_n(key_grads, BLOCK, 0.0f);
        std::fill_n(value_grads, BLOCK, 0.0f);
        for (int first = start; first < length; first += TILE) {
            const int seen = std::min(KEY_BLOCK, first + TILE - start);
            project(keys, queries_across + first * WIDTH, seen, weights);
            project(values, grads_across + first * WIDTH, seen, score_grads);
            if (first < start + KEY_BLOCK) hide_later(weights + (first - start) * TILE);
            if (first == 0) set_first_weight<FORM>(weights, bound);
            total += differentiate<FORM>(weights, score_grads, seen, first, constants);
            if (FORM == EIGHTH_POWER && first == 0) {  // the first weight is constant
                total[0] -= score_grads[0];
                score_grads[0] = 0.0f;
            }
            for (int i = 0; i < TILE; i += STRIP)
                mix(score_grads + i, 1, TILE, keys, seen, query_grads + (first + i) * WIDTH);
            for (int j = 0; j < seen; j += STRIP) {
                mix(score_grads + j * TILE, TILE, 1, queries + first * WIDTH, TILE, key_grads + j * WIDTH);
                mix(weights + j * TILE, TILE, 1, grads + first * WIDTH, TILE, value_grads + j * WIDTH);
            }
        }
        head(pass.k_grad).write(start, num_keys, 1.0f, key_grads);
        head(pass.v_grad).write(start, num_keys, 1.0f, value_grads);
    }
    head(pass.q_grad).write(0, length, SCALE, query_grads);
    pass.score_grad_sums[index] = 0.0f;
    for (int i = 0; i < TILE; i++) pass.score_grad_sums[index] += total[i];
}

#define BY_FORM(HEAD, NUMBER) \
    {HEAD<SOFTMAX, NUMBER>, HEAD<SQUARE, NUMBER>, HEAD<EIGHTH_POWER, NUMBER>, HEAD<RELU, NUMBER>}

using HeadPass = void (*)(const Pass&, int64_t, Room);
constexpr HeadPass FORWARD[2][4] = {BY_FORM(forward_head, float), BY_FORM(forward_head, Bfloat16)};
constexpr HeadPass BACKWARD[2][4] = {BY_FORM(backward_head, float), BY_FORM(backward_head, Bfloat16)};

}  // namespace

// Number of floats that a thread needs for heads of this length.
extern "C" int64_t room_of(int is_backward, int64_t length) {
    const int64_t padded = padded_length(length);
    if (is_backward) return padded * (5 * WIDTH + 5) + 4 * BLOCK + 2 * KEY_BLOCK * TILE;
    return padded * (2 * WIDTH + TILE) + 3 * TILE * WIDTH;
}

// is_bf16: whether operands are Bfloat16 instead of float. form: a Form.
extern "C" void run(int is_backward, int is_bf16, int form, const Pass* pass) {
    const HeadPass head = (is_backward ? BACKWARD : FORWARD)[is_bf16][form];
    const int64_t room = room_of(is_backward, pass->length);
#pragma omp parallel for num_threads(pass->num_threads)
    for (int64_t index = 0; index < pass->batch * pass->num_heads; index++)
        head(*pass, index, Room{pass->room + omp_get_thread_num() * room});
}
