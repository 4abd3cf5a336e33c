/* Elements at random places. Every rank draws the same places, like `distinct_indices` in
 * hvdcomp/compressors/randomness.py. */
#include "half.h"
#include "isa.h"
#include "make.h"
#include "randomness.h"
#include "sparse.h"

#define ROUNDS 8
#define LEAST_BITS 6
#define BATCH 512
#define BLOCK_BITS 16

struct job {
    const hvd_bucket *bucket;
    void *wire; /* sent values; a tensor's values begin at element `values` */
    float *sent;
    uint64_t *drawn;
    uint16_t *places;
    int64_t *ends; /* for each task, the end of its places */
    float bound;   /* bound of values in half precision; 0 for float32 values */
    int32_t unbiased, masking;
};

/* A permutation of the numbers below 2**bits. */
static void permute(uint64_t *numbers, int64_t count, int bits, uint64_t key) {
    uint32_t left[BATCH], right[BATCH];
    const int low = bits / 2, high = bits - low;
    const uint64_t mask = (1ull << low) - 1;
    for (int64_t i = 0; i < count; i++) {
        left[i] = (uint32_t)(numbers[i] >> low);
        right[i] = (uint32_t)(numbers[i] & mask);
    }
    for (int round = 0; round < ROUNDS; round++) {
        key += 0x9e3779b97f4a7c15u;
        if (round % 2)
            for (int64_t i = 0; i < count; i++) right[i] ^= hvd_word(hvd_weyl(left[i], key), key) >> (32 - low);
        else
            for (int64_t i = 0; i < count; i++) left[i] ^= hvd_word(hvd_weyl(right[i], key), key) >> (32 - high);
    }
    for (int64_t i = 0; i < count; i++) numbers[i] = (uint64_t)left[i] << low | right[i];
}

static void draw(uint64_t *drawn, int64_t count, uint64_t size, uint64_t key) {
    int bits = LEAST_BITS;
    while (bits < 64 && (size - 1) >> bits) bits++;
    uint64_t numbers[BATCH];
    uint16_t slots[BATCH];
    for (int64_t start = 0; start < count; start += BATCH) {
        int64_t left = hvd_shorter(count - start, BATCH);
        for (int64_t i = 0; i < left; i++) {
            numbers[i] = (uint64_t)(start + i);
            slots[i] = (uint16_t)i;
        }
        while (left > 0) { /* numbers that are too large are permuted again */
            permute(numbers, left, bits, key);
            int64_t again = 0;
            for (int64_t i = 0; i < left; i++) {
                const uint64_t number = numbers[i];
                const uint16_t slot = slots[i];
                drawn[start + slot] = number;
                numbers[again] = number;
                slots[again] = slot;
                again += number >= size;
            }
            left = again;
        }
    }
}

/* Shifts indices cyclically by `distance` places. */
static void rotate(uint64_t *indices, int64_t count, uint64_t size, uint64_t distance) {
    for (int64_t i = 0; i < count; i++) {
        const uint64_t moved = indices[i] + distance;
        indices[i] = moved < size ? moved : moved - size;
    }
}

/* Draws a tensor's elements and groups them by task. */
static void draw_places(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_segment *s = job->bucket->segments + number;
    uint64_t *drawn = job->drawn + s->values;
    uint16_t *places = job->places + s->values;
    int64_t *ends = job->ends + s->ends;
    const int64_t tasks = ((s->size - 1) >> BLOCK_BITS) + 1;
    draw(drawn, s->count, (uint64_t)s->size, s->key);
    rotate(drawn, s->count, (uint64_t)s->size, (uint64_t)s->shift);
    memset(ends, 0, (size_t)tasks * sizeof *ends);
    for (int64_t i = 0; i < s->count; i++) ends[drawn[i] >> BLOCK_BITS]++;
    for (int64_t i = 0, start = 0; i < tasks; i++) {
        const int64_t count = ends[i];
        ends[i] = start;
        start += count;
    }
    for (int64_t i = 0; i < s->count; i++) places[ends[drawn[i] >> BLOCK_BITS]++] = (uint16_t)drawn[i];
}

/* The number of the first of a tensor's values in a task. `end` receives the end of the task's values. */
static int64_t first_of(const struct job *job, const hvd_segment *s, const hvd_task *task, int64_t *end) {
    const int64_t block = task->start >> BLOCK_BITS, *ends = job->ends + s->ends;
    *end = s->values + ends[block];
    return s->values + (block ? ends[block - 1] : 0);
}

static void encode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    uint32_t largest = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK)
        hvd_x(job->bucket, s, task->start + done, hvd_shorter(task->length - done, HVD_BLOCK), &largest);
    const float *x = hvd_made(s, task->start);
    const float scale = job->unbiased ? (float)((double)s->size / (double)s->count) : 1.0f, bound = job->bound;
    int64_t end;
    for (int64_t i = first_of(job, s, task, &end); i < end; i++) {
        float value = x[job->places[i]] * scale;
        largest = hvd_magnitude(value) > largest ? hvd_magnitude(value) : largest;
        if (bound > 0) {
            /* Clipping would bias the value, unless the bucket keeps the excess as a residual. */
            if (job->unbiased && !job->bucket->keeps && __builtin_fabsf(value) > bound) largest = HVD_INFINITE;
            const uint16_t half = hvd_to_half(value > bound ? bound : value < -bound ? -bound : value);
            ((uint16_t *)job->wire)[i] = half;
            value = hvd_from_half(half);
        } else
            ((float *)job->wire)[i] = value;
        job->sent[i] = value;
    }
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(random_encode)(
    hvd_bucket *bucket, void *wire, float *sent, uint64_t *drawn, uint16_t *places, int64_t *ends, float bound,
    int32_t unbiased
) {
    struct job job = {bucket, wire, sent, drawn, places, ends, bound, unbiased, 0};
    hvd_parallel(bucket->threads, bucket->segment_count, draw_places, &job);
    hvd_parallel(bucket->threads, bucket->task_count, encode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static inline float mean_of(const struct job *job, int64_t i) {
    return job->bound > 0 ? hvd_from_half(((const uint16_t *)job->wire)[i]) : ((const float *)job->wire)[i];
}

/* Writes the means of a task as results of 16 bits. Each zero between the means is written only once, and x is not read
 * there. */
static uint32_t put_means_rounded(const struct job *job, const hvd_segment *s, const hvd_task *task) {
    const int32_t type = (int32_t)s->narrow;
    uint16_t *results = s->narrowed + task->start, highest = 0;
    int64_t end;
    memset(results, 0, (size_t)task->length * sizeof *results);
    for (int64_t i = first_of(job, s, task, &end); i < end; i++) {
        const float mean = 0 + mean_of(job, i); /* -0.0 becomes 0.0, as in float results */
        const uint16_t result = type == HVD_HALF ? hvd_to_half(mean) : hvd_to_bfloat16(mean);
        const uint16_t magnitude = result & 0x7fffu;
        results[job->places[i]] = result;
        highest = magnitude > highest ? magnitude : highest;
        if (job->bucket->keeps) s->x[task->start + job->places[i]] += mean - hvd_of_16_bits(result, type);
    }
    return highest >= (type == HVD_HALF ? 0x7c00 : 0x7f80) ? HVD_INFINITE : 0;
}

static uint32_t put_means(const struct job *job, const hvd_segment *s, const hvd_task *task) {
    float *result = s->result + task->start;
    uint32_t largest = 0;
    int64_t end;
    memset(result, 0, (size_t)task->length * sizeof *result);
    for (int64_t i = first_of(job, s, task, &end); i < end; i++) {
        const float mean = mean_of(job, i);
        result[job->places[i]] += mean;
        largest = hvd_magnitude(mean) > largest ? hvd_magnitude(mean) : largest;
    }
    return largest;
}

static void decode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    task->counts[0] = (s->narrow ? put_means_rounded : put_means)(job, s, task) >= HVD_INFINITE;
}

int32_t HVD_NAME(random_decode)(hvd_bucket *bucket, void *mean, uint16_t *places, int64_t *ends, int32_t half) {
    struct job job = {.bucket = bucket, .wire = mean, .places = places, .ends = ends, .bound = (float)half};
    hvd_parallel(bucket->threads, bucket->task_count, decode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static void keep_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    int64_t end;
    const int64_t first = first_of(job, s, task, &end);
    for (int64_t i = first; i < end; i++) s->x[task->start + job->places[i]] -= job->sent[i];
    if (job->masking && s->next_velocity)
        for (int64_t i = first; i < end; i++) s->next_velocity[task->start + job->places[i]] = 0;
}

void HVD_NAME(random_keep)(hvd_bucket *bucket, float *sent, uint16_t *places, int64_t *ends, int32_t masking) {
    struct job job = {.bucket = bucket, .sent = sent, .places = places, .ends = ends, .masking = masking};
    hvd_parallel(bucket->threads, bucket->task_count, keep_piece, &job);
}
