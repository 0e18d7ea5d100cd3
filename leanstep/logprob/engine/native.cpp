// The two passes over a tile of logits on one core: statistics of its rows, and its gradient.
//
// torch makes each in six passes, with a tile of scratch memory. Here a row is read in blocks that stay in the
// first-level cache; e^x is a polynomial without branches, so that compilers vectorise it everywhere.
//
// Built and called by passes.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int64_t BLOCK = 1024;
// Below this e^x is no normal number and counts as 0.
constexpr float FLOOR = -87.0f;

// e^x for FLOOR <= x <= 0, within 0.7 units of the last place: x = n log 2 + r, and Cephes' polynomial in r.
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

// A comparison with NaN is false: NaN passes through both, as it should.
inline float clamped(float x) { return x < FLOOR ? FLOOR : x; }
inline float exp_or_zero(float x) { return x < FLOOR ? 0.0f : exp_of(clamped(x)); }

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
            // The sums follow the maximum; before the first finite column they are 0.
            const double step = std::max(static_cast<double>(top) - block_top, -800.0);
            const double shrink = std::exp(step);
            t = (t + step * s) * shrink;
            s *= shrink;
            top = block_top;
        }
        // The lowest number in place of -inf: -inf minus it is -inf again, and not NaN.
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

}  // namespace

extern "C" {

// Adds the columns of z to the running maximum, sum e^(z-max) and sum e^(z-max) (z-max) of every row, and writes
// z at the row's token to `target` where the tile, whose first column is `first`, has it. `target` and
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
}
