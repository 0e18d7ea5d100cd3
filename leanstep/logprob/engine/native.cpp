// The passes over a tile of logits on one core: statistics of its rows, and its gradient; for two heads, a
// divergence between their softmaxes, and its gradient.
//
// torch takes six passes or more for each, with tiles of scratch memory. Here a row is read in blocks that stay in the
// first-level cache; e^x is a polynomial without branches, so that every compiler vectorizes it.
//
// Built and called by passes.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int64_t BLOCK = 1024;
// For smaller x, e^x is subnormal and is treated as 0.
constexpr float FLOOR = -87.0f;

// e^x for FLOOR <= x <= 0, within 0.7 ulp: x = n log 2 + r, and Cephes' polynomial in r.
inline float exp_of(float x) {
    const float n = std::nearbyint(x * 1.44269504f);
    // log 2 in two parts; n times the first is exact.
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

// A comparison with NaN is false, so NaN propagates through both.
inline float clamped(float x) { return x < FLOOR ? FLOOR : x; }
inline float exp_or_zero(float x) { return x < FLOOR ? 0.0f : exp_of(clamped(x)); }

// log x for a normal x > 0: x = 2^n f with f between sqrt(1/2) and sqrt(2), and Cephes' polynomial in f - 1.
inline float log_of(float x) {
    constexpr int32_t LOWEST = 0x3f3504f3;
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const int32_t above = bits - LOWEST;
    const float n = static_cast<float>(above >> 23);
    bits = (above & 0x007fffff) + LOWEST;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    f -= 1.0f;
    const float square = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return (f + (p * f * square - n * 2.12194440e-4f - 0.5f * square)) + n * 0.693359375f;
}

template <bool has_moment>
void add_row(const float* row, int64_t columns, float* maximum, float* sum, float* moment) {
    float top = *maximum;
    double s = *sum, t = has_moment ? *moment : 0.0;
    for (int64_t start = 0; start < columns; start += BLOCK) {
        const float* z = row + start;
        const int64_t count = std::min(BLOCK, columns - start);
        float block_top = top;
#pragma omp simd reduction(max : block_top)
        for (int64_t j = 0; j < count; ++j) block_top = z[j] > block_top ? z[j] : block_top;
        if (block_top > top) {
            // Rescale the sums to the new maximum; before the first finite column they are 0.
            const double step = std::max(static_cast<double>(top) - block_top, -800.0);
            const double shrink = std::exp(step);
            t = (t + step * s) * shrink;
            s *= shrink;
            top = block_top;
        }
        // Use the lowest number instead of -inf: -inf minus it is -inf, not NaN.
        const float shift = std::max(top, std::numeric_limits<float>::lowest());
        float block_s = 0.0f, block_t = 0.0f;
#pragma omp simd reduction(+ : block_s, block_t)
        for (int64_t j = 0; j < count; ++j) {
            const float x = z[j] - shift, e = exp_or_zero(x);
            block_s += e;
            if (has_moment) block_t += e * clamped(x);
        }
        s += block_s;
        t += block_t;
    }
    *maximum = top;
    *sum = static_cast<float>(s);
    if (has_moment) *moment = static_cast<float>(t);
}

// Whether the divergence compares with one side, with both, or omits the teacher's entropy; with LABELS the
// teacher's tile holds probabilities. The numbers are those of `Divergence.mode`.
enum Mode { FORWARD, REVERSE, BETWEEN, CROSS_ENTROPY, LABELS };

// a KL(q || m) + b KL(p || m), m = mix q + (1 - mix) p.
struct Kind {
    float a, b, mix;
};

// A row's log-probs: logits minus their maximum, minus the log of their sum.
struct Softmax {
    float max, log_sum;
    float log_prob(float z) const { return (z - max) - log_sum; }
};

struct Term {
    float value, slope, p, log_p;
};

// One column's contribution to the divergence D and S = p dD/dp (formulas: divergences.py).
template <int mode>
inline Term term_of(float z, float y, Softmax student, Softmax teacher, Kind kind) {
    const float log_p = student.log_prob(z), p = exp_or_zero(log_p);
    const float log_q = mode == LABELS ? 0.0f : teacher.log_prob(y);
    const float q = mode == LABELS ? y : exp_or_zero(log_q);
    Term term{0.0f, 0.0f, p, log_p};
    if (mode == REVERSE) {
        term.value = term.slope = p == 0.0f ? 0.0f : kind.b * (p * (log_p - log_q));
    } else if (mode == BETWEEN) {
        const float rest = 1.0f - kind.mix, both = kind.mix * q + rest * p;
        const float tiny = std::numeric_limits<float>::min();
        const float m = both < tiny ? tiny : both, log_m = log_of(m);
        const float share = kind.b * kind.mix - kind.a * rest;
        const float of_p = clamped(log_p) - log_m, of_q = clamped(log_q) - log_m;
        term.value = kind.a * (q * of_q) + kind.b * (p * of_p);
        term.slope = p * (kind.b * of_p + share * (q / m));
    } else {
        const float gap = mode == FORWARD ? log_q - log_p : -log_p;
        term.value = q == 0.0f ? 0.0f : kind.a * (q * gap);
        term.slope = -kind.a * q;
    }
    return term;
}

template <int mode>
void add_divergence(const float* z, const float* y, int64_t columns, Softmax student, Softmax teacher, Kind kind,
                    float* value, float* slope, float* entropy) {
    double d = 0.0, s = 0.0, h = 0.0;
    for (int64_t start = 0; start < columns; start += BLOCK) {
        const int64_t stop = std::min(columns, start + BLOCK);
        float block_d = 0.0f, block_s = 0.0f, block_h = 0.0f;
#pragma omp simd reduction(+ : block_d, block_s, block_h)
        for (int64_t j = start; j < stop; ++j) {
            const Term term = term_of<mode>(z[j], y[j], student, teacher, kind);
            block_d += term.value;
            block_s += term.slope;
            block_h -= term.p * clamped(term.log_p);
        }
        d += block_d;
        s += block_s;
        h += block_h;
    }
    *value += static_cast<float>(d);
    *slope += static_cast<float>(s);
    *entropy += static_cast<float>(h);
}

// Labels added to a divergence: their softmax has temperature 1, while z has another.
struct Hard {
    float factor, temperature, log_sum;
    int64_t column;
};

template <int mode>
void divergence_row(const float* z, const float* y, float* out, int64_t columns, Softmax student, Softmax teacher,
                    Kind kind, float slope_sum, float factor, float cap, Hard hard) {
    float du[BLOCK];
    for (int64_t start = 0; start < columns; start += BLOCK) {
        const int64_t count = std::min(BLOCK, columns - start);
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) {
            const Term term = term_of<mode>(z[start + j], y[start + j], student, teacher, kind);
            du[j] = factor * (term.slope - term.p * slope_sum);
        }
        if (hard.factor != 0.0f) {
#pragma omp simd
            for (int64_t j = 0; j < count; ++j)
                du[j] += hard.factor *
                         exp_or_zero((z[start + j] - student.max) * hard.temperature - hard.log_sum);
            const int64_t column = hard.column - start;
            if (0 <= column && column < count) du[column] -= hard.factor;
        }
        if (cap != 0.0f) {
#pragma omp simd
            for (int64_t j = 0; j < count; ++j) {
                const float tanh = z[start + j] / cap;
                du[j] *= (1.0f - tanh) * (1.0f + tanh);
            }
        }
        std::memcpy(out + start, du, count * sizeof(float));
    }
}

}  // namespace

extern "C" {

// Adds the columns of z to the running maximum, sum e^(z-max) and sum e^(z-max) (z-max) of every row, and writes
// z at the row's token to `target` if it is within the tile, whose first column is `first`. `target` and
// `moment` may be null.
void update_statistics(const float* z, int64_t rows, int64_t columns, int64_t stride, const int64_t* tokens,
                       int64_t first, float* target, float* maximum, float* sum, float* moment) {
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t column = target ? tokens[i] - first : -1;
        if (0 <= column && column < columns) target[i] = z[i * stride + column];
        if (moment)
            add_row<true>(z + i * stride, columns, maximum + i, sum + i, moment + i);
        else
            add_row<false>(z + i * stride, columns, maximum + i, sum + i, nullptr);
    }
}

// out <- e^(z-max) (constant + slope (z-max)) per row, plus `target` at the row's token; `out` may be z, `slope`
// and `target` may be null.
void scale_exponentials(const float* z, float* out, int64_t rows, int64_t columns, int64_t stride,
                        int64_t out_stride, const int64_t* tokens, int64_t first, const float* target,
                        const float* maximum, const float* constant, const float* slope) {
    for (int64_t i = 0; i < rows; ++i) {
        const float* from = z + i * stride;
        float* to = out + i * out_stride;
        const float shift = maximum[i], c = constant[i], k = slope ? slope[i] : 0.0f;
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) {
            const float x = from[j] - shift;
            to[j] = exp_or_zero(x) * (c + k * clamped(x));
        }
        const int64_t column = target ? tokens[i] - first : -1;
        if (0 <= column && column < columns) to[column] += target[i];
    }
}

// Adds the columns of a student's tile z and a teacher's y to every row's D, sum of S and entropy of the student.
// `statistics` are four vectors of length `rows`: max and log-sum of the student, then of the teacher.
void divergence_sums(const float* z, const float* y, int64_t rows, int64_t columns, int64_t z_stride,
                     int64_t y_stride, const float* const* statistics, int64_t mode, float a, float b, float mix,
                     float* value, float* slope, float* entropy) {
    const auto add = mode == FORWARD         ? add_divergence<FORWARD>
                     : mode == REVERSE       ? add_divergence<REVERSE>
                     : mode == BETWEEN       ? add_divergence<BETWEEN>
                     : mode == CROSS_ENTROPY ? add_divergence<CROSS_ENTROPY>
                                             : add_divergence<LABELS>;
    for (int64_t i = 0; i < rows; ++i)
        add(z + i * z_stride, y + i * y_stride, columns, {statistics[0][i], statistics[1][i]},
            {statistics[2][i], statistics[3][i]}, {a, b, mix}, value + i, slope + i, entropy + i);
}

// out <- factor (S - p slope) per row, and 0 if both factors are 0; `out` may be z or y. `cap` is softcap / temperature,
// or 0. With `tokens`, the gradient of their cross-entropy at temperature 1 is added, times `hard_factor`.
void divergence_gradient(const float* z, const float* y, float* out, int64_t rows, int64_t columns,
                         int64_t z_stride, int64_t y_stride, int64_t out_stride, const float* const* statistics,
                         int64_t mode, float a, float b, float mix, const float* slope, const float* factor,
                         float cap, const int64_t* tokens, int64_t first, const float* hard_factor,
                         const float* hard_log_sum, float temperature) {
    const auto write = mode == FORWARD         ? divergence_row<FORWARD>
                       : mode == REVERSE       ? divergence_row<REVERSE>
                       : mode == BETWEEN       ? divergence_row<BETWEEN>
                       : mode == CROSS_ENTROPY ? divergence_row<CROSS_ENTROPY>
                                               : divergence_row<LABELS>;
    for (int64_t i = 0; i < rows; ++i) {
        float* to = out + i * out_stride;
        Hard hard{0.0f, temperature, 0.0f, -1};
        if (tokens) hard = {hard_factor[i], temperature, hard_log_sum[i], tokens[i] - first};
        if (factor[i] == 0.0f && hard.factor == 0.0f) {
            std::memset(to, 0, columns * sizeof(float));
            continue;
        }
        write(z + i * z_stride, y + i * y_stride, to, columns, {statistics[0][i], statistics[1][i]},
              {statistics[2][i], statistics[3][i]}, {a, b, mix}, slope[i], factor[i], cap, hard);
    }
}
}
