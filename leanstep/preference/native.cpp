// The objective on one core: pairs, targets, terms and gradient in two calls, reading only what matters.
//
// The torch version of the same (fused.py) spends its time on the dispatch of small operations. Here a pair
// looks at the gists of its two contexts, finds their partners by binary search in the ascending positions,
// and visits only entries that have a target. Sums run in double, in a fixed order.
//
// Built and called by native.py; the structs there and here must agree field by field.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
// glibc has vector versions of these; the attribute lets the compiler use them without -ffast-math, under
// which a NaN score could come out as a finite loss.
extern "C" __attribute__((simd("notinbranch"))) float expf(float) noexcept;
extern "C" __attribute__((simd("notinbranch"))) float log1pf(float) noexcept;
extern "C" __attribute__((simd("notinbranch"))) double exp(double) noexcept;
extern "C" __attribute__((simd("notinbranch"))) double log1p(double) noexcept;
#endif

namespace {

inline float exp_of(float x) { return expf(x); }
inline double exp_of(double x) { return exp(x); }
inline float log1p_of(float x) { return log1pf(x); }
inline double log1p_of(double x) { return log1p(x); }

struct Contexts {
    const int64_t* pos;
    const int8_t* lod;
    const uint8_t* valid;
    int64_t num_contexts, width;
    // 1 when positions are known to ascend inside every context.
    int64_t ascending;
};

struct PairList {
    const int64_t* better;
    const int64_t* worse;
    const void* delta;
    const uint8_t* live;
    int64_t num_pairs;
};

struct Settings {
    double margin, rank_weight, budget_weight, smooth_weight, smooth_beta, collapse_weight, hinge_margin, tau;
    int64_t block_size, max_lod, form;  // 0 logistic, 1 hinge, 2 squared hinge
    int64_t pref, rank, budget, smooth, need_grad;
};

struct Outputs {
    void* pref;
    void* rank;
    void* budget;
    void* smooth;
    uint8_t* kept;
    void* grad;   // [V, W], zero on entry
    void* state;  // moving average, in and out
    void* loss;
};

// One context: its run of valid entries and the gists among them.
struct Context {
    int64_t first = 0, last = 0;
    std::vector<int32_t> gists;
};

bool read_context(const Contexts& all, int64_t which, Context& out) {
    const int64_t width = all.width;
    const uint8_t* valid = all.valid + which * width;
    const int8_t* lod = all.lod + which * width;
    const void* begin = std::memchr(valid, 1, width);
    out.gists.clear();
    out.first = begin ? static_cast<const uint8_t*>(begin) - valid : 0;
    const void* end = begin ? std::memchr(begin, 0, width - out.first) : valid;
    out.last = end ? static_cast<const uint8_t*>(end) - valid : width;
    if (begin && std::memchr(valid + out.last, 1, width - out.last)) return false;  // a hole
    if (!all.ascending) {
        const int64_t* pos = all.pos + which * width;
        bool falls = false;
        for (int64_t j = out.first + 1; j < out.last; ++j) falls |= pos[j] <= pos[j - 1];
        if (falls) return false;
    }
    int64_t j = out.first;
    for (; j + 8 <= out.last; j += 8) {
        uint64_t eight;
        std::memcpy(&eight, lod + j, 8);
        if (eight)
            for (int64_t k = j; k < j + 8; ++k)
                if (lod[k]) out.gists.push_back(k);
    }
    for (; j < out.last; ++j)
        if (lod[j]) out.gists.push_back(j);
    return true;
}

// The entries of the worse context with a target: sign +1 expand, -1 collapse.
struct Targets {
    std::vector<int32_t> entry;
    std::vector<int8_t> sign;  // by entry of the context, 0 between calls

    void mark(int64_t j, int8_t value) {
        if (!sign[j]) entry.push_back(j);
        sign[j] = value;
    }

    void find(const Contexts& all, const Context& worse, int64_t w, const Context& better, int64_t g,
              const Settings& s) {
        const int64_t *pos_w = all.pos + w * all.width, *pos_g = all.pos + g * all.width;
        const int8_t *lod_w = all.lod + w * all.width, *lod_g = all.lod + g * all.width;
        entry.clear();
        for (int32_t j : worse.gists) {
            const int64_t* at = std::lower_bound(pos_g + better.first, pos_g + better.last, pos_w[j]);
            if (at != pos_g + better.last && *at == pos_w[j] && lod_g[at - pos_g] < lod_w[j]) mark(j, 1);
        }
        for (int32_t k : better.gists) {
            const int64_t* begin = pos_w + worse.first;
            const int64_t* end = pos_w + worse.last;
            const int64_t* at = std::lower_bound(begin, end, pos_g[k]);
            if (at == end || *at != pos_g[k]) continue;
            const int8_t level = lod_w[at - pos_w];
            if (level >= lod_g[k] || level >= s.max_lod) continue;
            int64_t size = s.block_size;
            for (int8_t up = 0; up < level; ++up) size *= s.block_size;
            const int64_t start = pos_g[k] / size * size;
            // A request reaches its whole parent block and wins over expand.
            for (at = std::lower_bound(begin, at, start); at != end && *at < start + size; ++at)
                if (lod_w[at - pos_w] == level) mark(at - pos_w, -1);
        }
    }
};

template <typename Real>
struct Rows {
    std::vector<Real> x, sign, span, wrong, cost, slope;

    void resize(size_t n) {
        for (auto* v : {&x, &sign, &span, &wrong, &cost, &slope}) v->resize(n);
    }
};

template <typename Real>
void preference(Rows<Real>& r, int64_t n, Real scale, const Settings& s) {
    const Real *x = r.x.data(), *sign = r.sign.data();
    Real *wrong = r.wrong.data(), *cost = r.cost.data(), *slope = r.slope.data();
    for (int64_t i = 0; i < n; ++i) wrong[i] = -sign[i] * x[i] * scale;
    if (s.form == 0) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const Real z = wrong[i], e = exp_of(-std::abs(z)), up = 1 / (1 + e);
            cost[i] = (z < 0 ? Real(0) : z) + log1p_of(e);  // NaN stays NaN
            slope[i] = z > 0 ? up : e * up;
        }
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        const Real h = wrong[i] + static_cast<Real>(s.hinge_margin), hinge = h < 0 ? Real(0) : h;
        cost[i] = s.form == 1 ? hinge : hinge * hinge;
        slope[i] = s.form == 1 ? static_cast<Real>(h > 0) : 2 * hinge;
    }
}

template <typename Real, typename Loss>
int rows_of(const Contexts& all, const PairList& pairs, const Settings& s, const Outputs& out,
            const Real* scores) {
    std::vector<Context> contexts(all.num_contexts);
    for (int64_t v = 0; v < all.num_contexts; ++v)
        if (!read_context(all, v, contexts[v])) return 1;
    const Loss* delta = static_cast<const Loss*>(pairs.delta);
    Real* grad = static_cast<Real*>(out.grad);
    Targets targets;
    targets.sign.assign(all.width, 0);
    Rows<Real> r;
    double total = 0, state = *static_cast<Real*>(out.state);
    int64_t kept = 0;
    auto put = [](void* column, int64_t p, double value) {
        if (column) static_cast<Real*>(column)[p] = static_cast<Real>(value);
    };
    for (int64_t p = 0; p < pairs.num_pairs; ++p) {
        double pref = 0, rank = 0, imbalance = 0, offset = 0;
        int64_t n = 0;
        const int64_t w = pairs.worse[p], base = w * all.width;
        if (pairs.live[p]) {
            targets.find(all, contexts[w], w, contexts[pairs.better[p]], pairs.better[p], s);
            n = targets.entry.size();
        }
        out.kept[p] = n > 0;
        if (n) {
            ++kept;
            r.resize(n);
            int64_t num_up = 0;
            double sum_up = 0, sum_down = 0, signed_mass = 0, size = 1e-6;
            for (int64_t i = 0; i < n; ++i) {
                const int32_t j = targets.entry[i];
                const int8_t sign = targets.sign[j];
                targets.sign[j] = 0;
                const Real x = scores[base + j];
                int64_t span = 1;
                for (int8_t up = 0; up < all.lod[base + j]; ++up) span *= s.block_size;
                r.x[i] = x, r.sign[i] = sign, r.span[i] = static_cast<Real>(span);
                num_up += sign > 0;
                (sign > 0 ? sum_up : sum_down) += x;
                signed_mass += static_cast<double>(span) * x;
                size += static_cast<double>(span) * std::abs(x);
            }
            const int64_t num_down = n - num_up;
            double rate_pref = 0, rate_up = 0, rate_down = 0, pull = 0;
            if (s.pref) {
                const double d = delta[p], scale = std::max(1.0, d) / s.tau;
                const double strength = std::max(std::tanh(d), 1e-6) / n;
                preference(r, n, static_cast<Real>(scale), s);
                for (int64_t i = 0; i < n; ++i)
                    pref += r.sign[i] < 0 ? r.cost[i] * s.collapse_weight : r.cost[i];
                pref *= strength;
                rate_pref = -scale * strength;
            }
            if (s.rank && num_up && num_down) {
                const double short_by = s.margin - (sum_up / num_up - sum_down / num_down);
                rank = short_by > 0 || short_by != short_by ? short_by : 0;
                if (short_by > 0) rate_up = -s.rank_weight / num_up, rate_down = s.rank_weight / num_down;
            }
            if (s.budget || s.smooth) {
                imbalance = signed_mass / size;
                if (s.budget) pull = 2 * s.budget_weight * imbalance;
                if (s.smooth) {
                    state = s.smooth_beta * state + (1 - s.smooth_beta) * imbalance;
                    offset = imbalance - state;
                    pull += 2 * s.smooth_weight * offset;
                }
                pull /= size;
            }
            if (s.need_grad) {
                for (int64_t i = 0; i < n; ++i) {
                    const bool down = r.sign[i] < 0;
                    double g = down ? rate_down : rate_up;
                    if (s.pref)
                        g += rate_pref * r.slope[i] * r.sign[i] * (down ? s.collapse_weight : 1.0);
                    // d imbalance / dx = span (1 - imbalance sign(x)) / size where x != 0.
                    const double side = r.x[i] > 0 ? 1 : r.x[i] < 0 ? -1 : 0;
                    g += pull * r.span[i] * (1 - imbalance * side) * side * side;
                    grad[base + targets.entry[i]] += static_cast<Real>(g);
                }
            }
        }
        put(out.pref, p, pref);
        put(out.rank, p, rank);
        put(out.budget, p, imbalance * imbalance);
        put(out.smooth, p, offset * offset);
        if (s.pref) total += pref;
        if (s.rank) total += s.rank_weight * rank;
        if (s.budget) total += s.budget_weight * imbalance * imbalance;
        if (s.smooth) total += s.smooth_weight * offset * offset;
    }
    *static_cast<Real*>(out.state) = static_cast<Real>(state);
    *static_cast<Real*>(out.loss) = static_cast<Real>(total / std::max<int64_t>(kept, 1));
    if (s.need_grad) {
        const Real share = static_cast<Real>(1.0 / std::max<int64_t>(kept, 1));
        for (int64_t i = 0; i < all.num_contexts * all.width; ++i) grad[i] *= share;
    }
    return 0;
}

template <typename Loss>
void pairs_of(const Loss* loss, const int64_t* row, int64_t num_samples, int64_t num_variants, int64_t slots,
              double hard_ratio, int64_t* better, int64_t* worse, Loss* delta, uint8_t* live, uint8_t* valid) {
    struct Pair {
        int64_t better, worse;
        Loss delta;
    };
    std::vector<int64_t> order(num_variants);
    std::vector<Pair> list;
    const auto larger = [](const Pair& a, const Pair& b) { return a.delta > b.delta; };
    for (int64_t b = 0; b < num_samples; ++b) {
        const Loss* l = loss + b * num_variants;
        const int64_t* context = row + b * num_variants;
        order.clear();
        for (int64_t c = 0; c < num_variants; ++c)
            if (l[c] == l[c]) order.push_back(c);
        std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return l[i] < l[j]; });
        const int64_t scored = order.size();
        list.clear();
        for (int64_t i = 0; i < scored; ++i) {
            for (int64_t j = i + 1; j < scored; ++j)
                list.push_back({context[order[i]], context[order[j]], l[order[j]] - l[order[i]]});
            // Pairs with the best variant first, then all others, each list by delta.
            if (i == 0) std::stable_sort(list.begin(), list.end(), larger);
        }
        const int64_t primary = std::max<int64_t>(scored - 1, 0);
        std::stable_sort(list.begin() + std::min<int64_t>(primary, list.size()), list.end(), larger);
        const int64_t late = list.size() - std::min<int64_t>(primary, list.size());
        const int64_t quota = std::max<int64_t>(1, std::ceil(late * hard_ratio));
        const int64_t used = std::min<int64_t>(slots, primary + std::min(late, quota));
        for (int64_t k = 0; k < slots; ++k) {
            const int64_t p = b * slots + k;
            const Pair pair = k < used ? list[k] : Pair{context[0], context[0], 0};
            better[p] = pair.better, worse[p] = pair.worse;
            live[p] = pair.delta > 0, valid[p] = k < used;
            delta[p] = live[p] ? pair.delta : 0;
        }
    }
}

}  // namespace

extern "C" {

// Returns 1, with the outputs half written, when a context has holes or falls: the caller takes another path.
int lens_rows(const Contexts* contexts, const PairList* pairs, const Settings* settings, const Outputs* outputs,
              const void* scores, int64_t scores_double, int64_t loss_double) {
    const double* wide = static_cast<const double*>(scores);
    const float* narrow = static_cast<const float*>(scores);
    if (scores_double)
        return loss_double ? rows_of<double, double>(*contexts, *pairs, *settings, *outputs, wide)
                           : rows_of<double, float>(*contexts, *pairs, *settings, *outputs, wide);
    return loss_double ? rows_of<float, double>(*contexts, *pairs, *settings, *outputs, narrow)
                       : rows_of<float, float>(*contexts, *pairs, *settings, *outputs, narrow);
}

void lens_pairs(const void* loss, const int64_t* row, int64_t num_samples, int64_t num_variants, int64_t slots,
                double hard_ratio, int64_t loss_double, int64_t* better, int64_t* worse, void* delta,
                uint8_t* live, uint8_t* valid) {
    if (loss_double)
        pairs_of(static_cast<const double*>(loss), row, num_samples, num_variants, slots, hard_ratio, better,
                 worse, static_cast<double*>(delta), live, valid);
    else
        pairs_of(static_cast<const float*>(loss), row, num_samples, num_variants, slots, hard_ratio, better,
                 worse, static_cast<float*>(delta), live, valid);
}
}
