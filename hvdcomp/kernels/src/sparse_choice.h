/* Chooses exactly k of a tensor's candidates, with the search of each method. */
#ifndef HVD_SPARSE_CHOICE_H
#define HVD_SPARSE_CHOICE_H

#include <math.h>

#include "sparse.h"

/* A tensor's candidates. */
struct hvd_view {
    const hvd_bucket *bucket;
    const hvd_sparse *sparse;
    const hvd_segment *s;
    hvd_choice *choice;
    int64_t reached;  /* number of candidates */
    uint32_t largest; /* bits of the largest magnitude */
};

/* A task's candidates. */
struct hvd_run {
    const float *values;
    const uint16_t *places; /* places in the task; NULL stands for 0, 1, 2 ... */
    int64_t length;
    int64_t start; /* where the task begins in the tensor */
};

/* Describes the sent elements. An element is sent if its magnitude, as bits, reaches a bound: least[0] if its index is
 * below `first`, least[1] if its index is below `second`, otherwise least[2]. */
struct hvd_chosen {
    int64_t first, second;
    uint32_t least[3];
};

static inline struct hvd_view hvd_view_of(const hvd_bucket *bucket, const hvd_sparse *sparse, int64_t number) {
    struct hvd_view view = {bucket, sparse, bucket->segments + number, sparse->choices + number, 0, 0};
    view.choice->whole = 0;
    for (int64_t i = 0; i < view.choice->tasks; i++) {
        const hvd_candidates *found = sparse->candidates + view.choice->first_task + i;
        view.reached += found->reached;
        view.largest = found->largest > view.largest ? found->largest : view.largest;
    }
    return view;
}

static inline struct hvd_run hvd_run_of(const struct hvd_view *view, int64_t number) {
    const int64_t task_number = view->choice->first_task + number;
    const hvd_task *task = view->bucket->tasks + task_number;
    const hvd_candidates *found = view->sparse->candidates + task_number;
    if (view->choice->whole || found->stored < 0) {
        struct hvd_run all = {hvd_made(view->s, 0) + task->start, NULL, task->length, task->start};
        return all;
    }
    struct hvd_run some = {
        view->sparse->values + found->place, view->sparse->places + found->place, found->stored, task->start
    };
    return some;
}

/* The number of a run's candidates with an index below `end`. */
static inline int64_t hvd_before(const struct hvd_run *run, int64_t end) {
    const int64_t place = end - run->start;
    if (place <= 0) return 0;
    if (!run->places) return place < run->length ? place : run->length;
    int64_t low = 0, high = run->length;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (run->places[middle] < place) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The number of candidates with an index below `end` that reach `least`. `least` must not be below the floor. */
static inline int64_t hvd_count_before(const struct hvd_view *view, uint32_t least, int64_t end) {
    int64_t count = 0;
    for (int64_t i = 0; i < view->choice->tasks; i++) {
        const struct hvd_run run = hvd_run_of(view, i);
        count += hvd_count(run.values, end < view->s->size ? hvd_before(&run, end) : run.length, least);
    }
    return count;
}

/* Considers the elements that reach `low` but not `high`, counted from 1. Returns the index after element number
 * `number`, or the tensor's size if there are fewer such elements. */
static inline int64_t hvd_end_of(const struct hvd_view *view, int64_t number, uint32_t low, uint32_t high) {
    for (int64_t i = 0; number > 0 && i < view->choice->tasks; i++) {
        const struct hvd_run run = hvd_run_of(view, i);
        const int64_t between = hvd_count(run.values, run.length, low) - hvd_count(run.values, run.length, high);
        if (between < number) {
            number -= between;
            continue;
        }
        for (int64_t j = 0; j < run.length; j++) {
            const uint32_t bits = hvd_magnitude(run.values[j]);
            if (bits >= low && bits < high && --number == 0) return run.start + (run.places ? run.places[j] : j) + 1;
        }
    }
    return number > 0 ? view->s->size : 0;
}

/* Chooses the k largest elements with an index below `end` (among equal elements, the first ones), and all elements
 * that reach `high`.
 *
 * Of the elements with an index below `end`, at least k must reach `low`, and at most k may reach `high`. */
static inline struct hvd_chosen hvd_largest_before(
    const struct hvd_view *view, int64_t k, uint32_t low, uint32_t high, int64_t end
) {
    struct hvd_chosen chosen = {end, end, {low, low, high}};
    int64_t above = -1; /* number of elements that reach `upper`; -1 until `upper` changes */
    uint32_t upper = high;
    while (upper - low > 1) {
        const uint32_t middle = low + (upper - low) / 2;
        const int64_t count = hvd_count_before(view, middle, end);
        if (count >= k) low = middle;
        else {
            upper = middle;
            above = count;
        }
        chosen.least[0] = low;
        if (count == k) return chosen;
    }
    if (above < 0) above = upper > view->largest ? 0 : hvd_count_before(view, upper, end);
    chosen.first = hvd_end_of(view, k - above, low, upper);
    chosen.least[1] = upper;
    return chosen;
}

/* Makes all elements candidates. */
static inline void hvd_take_all(struct hvd_view *view) {
    view->choice->whole = 1;
    view->choice->floor = 0;
    view->reached = view->s->size;
}

static inline struct hvd_chosen hvd_choose_largest(struct hvd_view *view) {
    const hvd_choice *choice = view->choice;
    const uint32_t floor = choice->floor;
    const uint32_t above_all = view->largest + 1;
    if (view->reached >= view->s->count)
        return hvd_largest_before(view, view->s->count, floor, above_all, view->s->size);
    hvd_take_all(view);
    return hvd_largest_before(view, view->s->count, 0, floor, view->s->size);
}

/* The search for a threshold. `hvdcomp/compressors/thresholds.py` does the same search with array functions. */

struct hvd_bracket {
    double low, high;
    int too_few, too_many;
};

/* The bits of a threshold, rounded to float32 for comparison with magnitudes. */
static inline uint32_t hvd_threshold_bits(double threshold) { return hvd_bits((float)threshold); }

static inline void hvd_test(const struct hvd_view *view, struct hvd_bracket *bracket, double threshold) {
    const uint32_t bits = hvd_threshold_bits(threshold);
    const int64_t count = bits < view->choice->floor ? view->reached : hvd_count_before(view, bits, view->s->size);
    bracket->too_few = count < view->s->count;
    bracket->too_many = count > view->choice->most;
    if (bracket->too_many && threshold > bracket->low) bracket->low = threshold;
    if (!bracket->too_many && threshold < bracket->high) bracket->high = threshold;
}

/* The mean of the magnitudes. */
static inline double hvd_mean_magnitude(const struct hvd_view *view) {
    double sum = 0;
    for (int64_t i = 0; i < view->choice->tasks; i++)
        sum += view->sparse->candidates[view->choice->first_task + i].sum;
    return sum / (double)view->s->size;
}

static inline void hvd_bisect(const struct hvd_view *view, struct hvd_bracket *bracket) {
    const double mean = hvd_mean_magnitude(view);
    double left = 0, right = 1;
    const double width = hvd_of_bits(view->largest) - mean;
    for (int32_t round = 0; round < view->sparse->rounds; round++) {
        const double middle = (left + right) / 2;
        hvd_test(view, bracket, mean + middle * width);
        if (!bracket->too_few && !bracket->too_many) return;
        if (bracket->too_few) right = middle;
        else left = middle;
    }
}

/* The magnitude that `reaching` elements of a sample reach. */
static inline double hvd_sample_threshold(const float *sample, int64_t sampled, int64_t reaching) {
    uint32_t low = 0, high = hvd_largest_bits(sample, sampled, 0) + 1;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (hvd_count(sample, sampled, middle) >= reaching) low = middle;
        else high = middle;
    }
    return hvd_of_bits(low);
}

static inline void hvd_step_by_step(const struct hvd_view *view, struct hvd_bracket *bracket) {
    const hvd_choice *choice = view->choice;
    const float *sample = view->sparse->sample + choice->sample;
    const double largest = hvd_of_bits(view->largest);
    double threshold = hvd_sample_threshold(sample, choice->sampled, choice->reaching);
    for (int32_t round = 0; round < view->sparse->rounds; round++) {
        hvd_test(view, bracket, threshold);
        if (!bracket->too_few && !bracket->too_many) return;
        const double following = threshold * (bracket->too_few ? 0.8 : 1.3);
        const double highest = bracket->high < largest ? bracket->high : largest;
        const int untried = following > bracket->low && following <= highest;
        threshold = untried ? following : (bracket->low + highest) / 2;
    }
}

/* Considers the magnitudes that reach a threshold: the sum of their excesses over the threshold, and their number. */
static inline double hvd_excess(const float *restrict x, int64_t length, float threshold, int64_t *reached) {
    double sum = 0;
    for (int64_t start = 0; start < length; start += HVD_BLOCK) {
        const int64_t end = hvd_shorter(start + HVD_BLOCK, length);
        float lanes[16] = {0};
        int32_t counts[16] = {0};
        int64_t i = start;
        for (; i + 16 <= end; i += 16)
            for (int lane = 0; lane < 16; lane++) {
                const float excess = __builtin_fabsf(x[i + lane]) - threshold;
                lanes[lane] += excess > 0 ? excess : 0;
                counts[lane] += excess >= 0;
            }
        for (; i < end; i++) {
            const float excess = __builtin_fabsf(x[i]) - threshold;
            lanes[0] += excess > 0 ? excess : 0;
            counts[0] += excess >= 0;
        }
        double block = 0;
        for (int lane = 0; lane < 16; lane++) {
            block += lanes[lane];
            *reached += counts[lane];
        }
        if (!(block <= 0x1p127)) { /* a lane may have overflowed */
            block = 0;
            for (i = start; i < end; i++) {
                const float excess = __builtin_fabsf(x[i]) - threshold;
                block += excess > 0 ? excess : 0;
            }
        }
        sum += block;
    }
    return sum;
}

/* The mean excess over a threshold of the magnitudes that reach it; 0 if no magnitude reaches it. */
static inline float hvd_mean_excess(const struct hvd_view *view, float threshold) {
    double sum = 0;
    int64_t reached = 0;
    if (hvd_bits(threshold) < view->choice->floor)
        sum = hvd_excess(hvd_made(view->s, 0), view->s->size, threshold, &reached);
    else
        for (int64_t i = 0; i < view->choice->tasks; i++) {
            const struct hvd_run run = hvd_run_of(view, i);
            sum += hvd_excess(run.values, run.length, threshold, &reached);
        }
    return (float)(sum / (double)(reached ? reached : 1));
}

static inline void hvd_stage_by_stage(const struct hvd_view *view, struct hvd_bracket *bracket) {
    float threshold = 0;
    for (int32_t stage = 0; stage < view->sparse->rounds; stage++) {
        const float step = stage ? view->choice->later : view->choice->first;
        threshold += (stage ? hvd_mean_excess(view, threshold) : (float)hvd_mean_magnitude(view)) * step;
        hvd_test(view, bracket, threshold);
    }
}

/* Chooses the k largest among the first `most` elements. The elements that reach the upper threshold come first, then
 * those that reach only the lower threshold, each in index order. */
static inline struct hvd_chosen hvd_pick(struct hvd_view *view, const struct hvd_bracket *bracket) {
    const int64_t k = view->s->count, most = view->choice->most, size = view->s->size;
    const uint32_t low = hvd_threshold_bits(bracket->low), high = hvd_threshold_bits(bracket->high);
    const int64_t in_front = high > view->largest ? 0 : hvd_count_before(view, high, size);
    if (in_front == k) {
        struct hvd_chosen front = {size, size, {high, high, high}};
        return front;
    }
    if (in_front > k) return hvd_largest_before(view, k, high, view->largest + 1, size);
    if (low < view->choice->floor) hvd_take_all(view);
    const int64_t end = hvd_end_of(view, most - in_front, low, high);
    struct hvd_chosen all = {end, end, {low, low, high}};
    if (most == k) return all;
    const int64_t in_front_of_end = high > view->largest ? 0 : hvd_count_before(view, high, end);
    return hvd_largest_before(view, k - in_front + in_front_of_end, low, high, end);
}

static inline struct hvd_chosen hvd_choose(struct hvd_view *view) {
    if (view->largest >= HVD_INFINITE) { /* this step does not count */
        struct hvd_chosen any = {view->s->size, view->s->size, {0, 0, 0}};
        hvd_take_all(view);
        return any;
    }
    if (view->sparse->method == HVD_KTH_LARGEST) return hvd_choose_largest(view);
    if (view->reached < view->choice->need) hvd_take_all(view);
    struct hvd_bracket bracket = {0, INFINITY, 0, 0};
    if (view->sparse->method == HVD_BISECT) hvd_bisect(view, &bracket);
    else if (view->sparse->method == HVD_FITTED) hvd_stage_by_stage(view, &bracket);
    else hvd_step_by_step(view, &bracket);
    return hvd_pick(view, &bracket);
}

#endif
