/* Sparsifiers that choose elements by magnitude. Encoding computes x, finds candidates among its elements, and chooses
 * among the candidates.
 *
 * The candidates are the elements that reach a floor. The pass that computes x collects them, and the search reads only
 * these few elements. The floor comes from a sample. If the sample was misleading, all elements are candidates. The
 * chosen elements do not depend on which elements are candidates. */
#include <math.h>

#include "collect.h"
#include "half.h"
#include "isa.h"
#include "make.h"
#include "sparse_choice.h"

#define LINE 16        /* number of elements of a cache line */
#define EXPECTED 50    /* expected number of needed elements in the sample */
#define SMALL 512      /* tensors up to this size have no sample */
#define MOST_SAMPLED 16384
#define LANES 64
#define CHUNK 512

struct job {
    const hvd_bucket *bucket;
    const hvd_sparse *sparse;
    uint8_t *wire;
};

/* The floor. */

/* The number of elements of a tensor to sample; 0 if all elements become candidates. */
static int64_t sample_size(int64_t size, int64_t need, int64_t share) {
    if (size <= SMALL) return 0;
    const double wanted = (double)EXPECTED * (double)size / (double)need;
    const int64_t most = hvd_shorter(size / share, MOST_SAMPLED);
    return (wanted < (double)most ? (int64_t)wanted : most) / LINE * LINE;
}

/* The start of line number `line` of a sample. The tensor is divided into equal parts, and the sample has one line from
 * each part. The line's place does not depend on rows or channels. */
static int64_t line_start(int64_t size, int64_t lines, int64_t line) {
    const int64_t part = size / LINE / lines;
    const uint64_t place = ((uint64_t)line + 1) * 0x9e3779b97f4a7c15u >> 32;
    return (line * part + (int64_t)(place * (uint64_t)part >> 32)) * LINE;
}

/* The bits of a magnitude that, as estimated from a sample, at least `need` of `size` elements reach, and not many
 * more. The result is 0 if nearly all elements are needed. Otherwise it is above 0, so that zeros never reach it. */
static uint32_t floor_of(const float *sample, int64_t sampled, int64_t need, int64_t size) {
    const double expected = (double)need / (double)size * (double)sampled;
    const int64_t rank = (int64_t)ceil(1.5 * expected + 4 * sqrt(expected) + 4);
    if (3 * rank > sampled) return 0;
    uint32_t high = hvd_largest_bits(sample, sampled, 0) + 1, low = 0;
    if (high > HVD_INFINITE) return 0;
    for (uint32_t step = 1u << 22; low == 0; step *= 2) {
        const uint32_t middle = high > step ? high - step : 1;
        if (middle == 1 || hvd_count(sample, sampled, middle) >= rank) low = middle;
        else high = middle;
    }
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const int64_t count = hvd_count(sample, sampled, middle);
        if (count >= rank) low = middle;
        else high = middle;
        if (count >= rank && count <= rank + rank / 8) break;
    }
    return low;
}

/* Finds the floor of a tensor that has several tasks. To do so, it computes x of the sampled lines first. */
static void find_floor(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_segment *s = job->bucket->segments + number;
    hvd_choice *choice = job->sparse->choices + number;
    if (choice->tasks == 1) return;
    float sample[MOST_SAMPLED];
    const int64_t lines = sample_size(s->size, choice->need, 16) / LINE;
    uint32_t ignored = 0;
    for (int64_t i = 0; i < lines; i++) {
        const float *x = hvd_x(job->bucket, s, line_start(s->size, lines, i), LINE, &ignored);
        memcpy(sample + i * LINE, x, LINE * sizeof *x);
    }
    choice->floor = floor_of(sample, lines * LINE, choice->need, s->size);
}

/* The floor of a tensor whose x is in a cache. */
static uint32_t floor_of_x(const float *x, int64_t size, int64_t need) {
    float sample[MOST_SAMPLED];
    const int64_t lines = sample_size(size, need, 4) / LINE;
    for (int64_t i = 0; i < lines; i++)
        memcpy(sample + i * LINE, x + line_start(size, lines, i), LINE * sizeof *x);
    return floor_of(sample, lines * LINE, need, size);
}

/* The pass that computes x. */

static double sum_of_magnitudes(const float *restrict x, int64_t length) {
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += __builtin_fabsf(x[i + lane]);
    for (; i < length; i++) lanes[i % LANES] += __builtin_fabsf(x[i]);
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    if (sum <= 0x1p127) return sum;
    sum = 0; /* a lane may have overflowed */
    for (i = 0; i < length; i++) sum += __builtin_fabsf(x[i]);
    return sum;
}

static void take_sample(const float *x, int64_t start, int64_t length, int64_t stride, float *sample) {
    for (int64_t i = (start + stride - 1) / stride; i * stride < start + length; i++)
        sample[i] = __builtin_fabsf(x[i * stride - start]);
}

static void add_candidates(
    const hvd_sparse *sparse, hvd_candidates *found, const float *x, int64_t length, uint32_t floor, int64_t first
) {
    if (found->stored >= 0 && found->stored + length > found->room &&
        found->stored + hvd_count(x, length, floor) > found->room)
        found->stored = -1;
    if (found->stored < 0) {
        found->reached += hvd_count(x, length, floor);
        return;
    }
    const int64_t place = found->place + found->stored;
    const int64_t count = hvd_collect(x, length, floor, first, sparse->values + place, sparse->places + place);
    found->stored += count;
    found->reached += count;
}

static void choose_and_pack(const struct job *job, int64_t number);

static void make_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_sparse *sparse = job->sparse;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    hvd_choice *choice = sparse->choices + task->segment;
    hvd_candidates *found = sparse->candidates + number;
    const int alone = choice->tasks == 1;
    uint32_t largest = 0;
    found->stored = alone || choice->floor ? 0 : -1;
    found->reached = choice->floor ? 0 : task->length;
    found->sum = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t start = task->start + done, length = hvd_shorter(task->length - done, HVD_BLOCK);
        const float *x = hvd_x(job->bucket, s, start, length, &largest);
        if (sparse->method == HVD_BISECT || sparse->method == HVD_FITTED) found->sum += sum_of_magnitudes(x, length);
        if (sparse->method == HVD_SAMPLED)
            take_sample(x, start, length, choice->stride, sparse->sample + choice->sample);
        if (!alone && choice->floor) add_candidates(sparse, found, x, length, choice->floor, done);
    }
    found->largest = largest;
    if (!alone) return;
    const float *x = hvd_made(s, 0);
    choice->floor = floor_of_x(x, s->size, choice->need);
    if (choice->floor) {
        found->reached = 0;
        add_candidates(sparse, found, x, s->size, choice->floor, 0);
    } else {
        found->stored = -1;
        found->reached = s->size;
    }
    choose_and_pack(job, task->segment);
}

/* The choice. */

struct packer {
    const struct job *job;
    const hvd_segment *s;
    int64_t packed;
};

/* Packs elements of a task that begins at element `start`. */
static void pack(struct packer *to, const float *values, const uint16_t *places, int64_t count, int64_t start) {
    const hvd_segment *s = to->s;
    const int64_t first = to->packed, width = s->index_bytes;
    uint8_t *wire = to->job->wire;
    count = hvd_shorter(count, s->count - first); /* there are more only if x contains NaN */
    if (to->job->sparse->type)
        for (int64_t i = 0; i < count; i++) {
            const uint16_t number = hvd_nearest_finite(values[i], to->job->sparse->type);
            memcpy(wire + s->values + 2 * (first + i), &number, 2);
        }
    else memcpy(wire + s->values + 4 * first, values, (size_t)count * 4);
    if (width == 2) memcpy(wire + s->indices + 2 * first, places, (size_t)count * 2);
    else
        for (int64_t i = 0; i < count; i++) {
            const int64_t index = start + places[i];
            memcpy(wire + s->indices + width * (first + i), &index, (size_t)width);
        }
    to->packed += count;
}

/* Packs those candidates of a task that reach `least` and whose numbers are from `from` up to, but not including,
 * `end`. */
static void pack_range(struct packer *to, const struct hvd_run *run, int64_t from, int64_t end, uint32_t least) {
    float values[CHUNK + HVD_SLACK];
    uint16_t places[CHUNK + HVD_SLACK];
    for (; from < end; from += CHUNK) {
        const int64_t length = hvd_shorter(end - from, CHUNK);
        const int64_t count = hvd_collect(run->values + from, length, least, run->places ? 0 : from, values, places);
        if (run->places)
            for (int64_t i = 0; i < count; i++) places[i] = run->places[from + places[i]];
        pack(to, values, places, count, run->start);
    }
}

static void choose_and_pack(const struct job *job, int64_t number) {
    const hvd_segment *s = job->bucket->segments + number;
    struct hvd_view view = hvd_view_of(job->bucket, job->sparse, number);
    const struct hvd_chosen chosen = hvd_choose(&view);
    struct packer to = {job, s, 0};
    for (int64_t i = 0; i < view.choice->tasks; i++) {
        const struct hvd_run run = hvd_run_of(&view, i);
        const int64_t first = hvd_before(&run, chosen.first), second = hvd_before(&run, chosen.second);
        const int64_t packed = to.packed;
        pack_range(&to, &run, 0, first, chosen.least[0]);
        pack_range(&to, &run, first, second, chosen.least[1]);
        pack_range(&to, &run, second, run.length, chosen.least[2]);
        if (s->block_counts >= 0) {
            const int32_t count = (int32_t)(to.packed - packed);
            memcpy(job->wire + s->block_counts + 4 * i, &count, sizeof count);
        }
    }
}

static void finish_tensor(void *context, int64_t number) {
    const struct job *job = context;
    if (job->sparse->choices[number].tasks > 1) choose_and_pack(job, number);
}

int32_t HVD_NAME(sparse_encode)(hvd_bucket *bucket, const hvd_sparse *sparse, uint8_t *wire) {
    struct job job = {bucket, sparse, wire};
    const int large = bucket->task_count > bucket->segment_count;
    if (large) hvd_parallel(bucket->threads, bucket->segment_count, find_floor, &job);
    hvd_parallel(bucket->threads, bucket->task_count, make_piece, &job);
    if (large) hvd_parallel(bucket->threads, bucket->segment_count, finish_tensor, &job);
    uint32_t largest = 0;
    for (int64_t i = 0; i < bucket->task_count; i++)
        largest = sparse->candidates[i].largest > largest ? sparse->candidates[i].largest : largest;
    return largest >= HVD_INFINITE;
}
