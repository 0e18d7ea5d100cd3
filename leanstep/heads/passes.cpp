// The two passes over a tile of fp32 logits, on one core: stats (forward) and grads (backward). kernels.py has the same
// passes in torch, which define what these compute. Built by leanstep/cpu.py without fast-math: NaN and -inf survive.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// e^x for -87 <= x <= 88: x = n log 2 + r, and Cephes' polynomial in r. No branches, so that every compiler vectorizes.
static inline float exp_of(float x) {
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
    std::memcpy(&power, &bits, 4);
    return p * power;
}

// Columns per fp32 partial sum, which stay in the first-level cache; blocks are added in fp64.
constexpr int64_t BLOCK = 1024;
// Below, e^x counts as 0 and x as LOW: 0 * LOW is 0 where 0 * -inf is NaN. Comparisons with NaN are false: NaN stays.
constexpr float LOW = -87.f;

// Per row, with x = k (z - max): max z, sum e^x, sum e^x x, z[id] (-inf if the id is in another tile), first argmax.
extern "C" void stats(const float* z, int64_t rows, int64_t cols, int64_t stride, const int64_t* ids, int64_t first_id,
                      const float* k, float* max, float* sum, float* sum_x, float* target, float* argmax) {
    for (int64_t i = 0; i < rows; ++i) {
        const float* row = z + i * stride;
        float m = -INFINITY;
        int64_t first = 0;
        for (int64_t b = 0; b < cols; b += BLOCK) {
            const int64_t n = std::min(BLOCK, cols - b);
            float block_m = -INFINITY;
#pragma omp simd reduction(max : block_m)
            for (int64_t j = 0; j < n; ++j) block_m = row[b + j] > block_m ? row[b + j] : block_m;
            if (block_m > m) m = block_m, first = b;
        }
        while (first < cols - 1 && row[first] != m) ++first;
        const float shift = m == -INFINITY ? 0.f : m, scale = k[i];
        double s = 0, t = 0;
        for (int64_t b = 0; b < cols; b += BLOCK) {
            const int64_t n = std::min(BLOCK, cols - b);
            float block_s = 0, block_t = 0;
#pragma omp simd reduction(+ : block_s, block_t)
            for (int64_t j = 0; j < n; ++j) {
                const float x = scale * (row[b + j] - shift), y = x < LOW ? LOW : x, e = x < LOW ? 0.f : exp_of(y);
                block_s += e;
                block_t += e * y;
            }
            s += block_s;
            t += block_t;
        }
        const int64_t id = ids[i] - first_id;
        max[i] = m, sum[i] = s, sum_x[i] = t, argmax[i] = first;
        target[i] = id >= 0 && id < cols ? row[id] : -INFINITY;
    }
}

// out <- slope (g onehot - p (a + b (log p + entropy))), log p = k (z - m) - log_s, slope = 1 - (z inv_cap)^2.
// `out` may be z.
extern "C" void grads(const float* z, float* out, int64_t rows, int64_t cols, int64_t stride, int64_t out_stride,
                      const int64_t* ids, int64_t first_id, const float* k, const float* m, const float* log_s,
                      const float* entropy, const float* a, const float* b, const float* g, float inv_cap) {
    for (int64_t i = 0; i < rows; ++i) {
        const float* row = z + i * stride;
        float* to = out + i * out_stride;
        const float ki = k[i], mi = m[i], li = log_s[i], hi = entropy[i], ai = a[i], bi = b[i];
        const int64_t id = ids[i] - first_id;
        const bool here = id >= 0 && id < cols;
        auto dz = [=](float u) {
            const float x = ki * (u - mi) - li, y = x < LOW ? LOW : x, e = x < LOW ? 0.f : exp_of(y);
            return -e * (ai + bi * (y + hi));
        };
        auto slope = [=](float u) { return (1 - u * inv_cap) * (1 + u * inv_cap); };
        if (inv_cap == 0.f) {  // apart: a -inf logit times 0 is NaN
#pragma omp simd
            for (int64_t j = 0; j < cols; ++j) to[j] = dz(row[j]);
            if (here) to[id] += g[i];
        } else {
            const float at = here ? slope(row[id]) : 0.f;
#pragma omp simd
            for (int64_t j = 0; j < cols; ++j) to[j] = dz(row[j]) * slope(row[j]);
            if (here) to[id] += g[i] * at;
        }
    }
}
