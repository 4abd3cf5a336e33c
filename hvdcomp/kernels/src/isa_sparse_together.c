/* Blocks of elements that all ranks send together: scores, the best blocks, and their means.
 *
 * The number of a tensor's first block, among the blocks of all tensors, is `blocks`. The tensor sends `count` blocks.
 * The numbers of the sent blocks, in ascending order, begin at `chosen` in the array `chosen`, and their elements begin
 * at `taken` on the wire. A block has `length` elements; the last block may have fewer and is padded with zeros. Tasks
 * consist of whole blocks: their start and length count blocks. */
#include <math.h>

#include "half.h"
#include "isa.h"
#include "make.h"
#include "put.h"
#include "quant.h"
#include "sparse.h"

struct job {
    const hvd_bucket *bucket;
    hvd_task *tasks;
    const float *judged;
    int64_t numbers; /* number of values of a block in `judged` */
    float *norms, *scores;
    void *wire;
    int32_t half; /* whether elements on the wire are in half precision */
    int64_t *chosen;
};

/* The end of a task's elements. */
static int64_t end_of(const hvd_segment *s, const hvd_task *task) {
    return hvd_shorter((task->start + task->length) * s->length, s->size);
}

static void judge_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t length = s->length, end = end_of(s, task);
    const int64_t together = length < HVD_BLOCK ? HVD_BLOCK / length * length : length;
    uint32_t largest = 0;
    for (int64_t first = task->start * length; first < end; first += together) {
        const int64_t last = hvd_shorter(first + together, end);
        for (int64_t start = first; start < last; start += HVD_BLOCK)
            hvd_x(job->bucket, s, start, hvd_shorter(HVD_BLOCK, last - start), &largest);
        for (int64_t start = first; start < last; start += length) {
            const double squares = hvd_sum_of_squares(hvd_made(s, start), hvd_shorter(length, last - start));
            const float norm = (float)sqrt(squares);
            job->norms[s->blocks + start / length] = norm * norm;
        }
    }
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(together_judge)(hvd_bucket *bucket, hvd_task *tasks, int64_t count, float *norms) {
    struct job job = {.bucket = bucket, .tasks = tasks, .norms = norms};
    hvd_parallel(bucket->threads, count, judge_piece, &job);
    return hvd_any_found(tasks, count);
}

/* Copies a block to the wire, at `place`, and subtracts the sent values from x. */
static void send(const struct job *job, const hvd_segment *s, int64_t block, int64_t place) {
    const int64_t start = block * s->length, length = hvd_shorter(s->length, s->size - start);
    const int64_t padding = s->length - length;
    const float *x = hvd_made(s, start);
    if (job->half) {
        uint16_t *wire = (uint16_t *)job->wire + place;
        for (int64_t i = 0; i < length; i++) wire[i] = hvd_to_half(hvd_within_half(x[i]));
        memset(wire + length, 0, (size_t)padding * sizeof *wire);
        if (s->x)
            for (int64_t i = 0; i < length; i++)
                s->x[start + i] = hvd_left(s->x[start + i], hvd_from_half(wire[i]) + 0.0f);
        return;
    }
    float *wire = (float *)job->wire + place;
    memcpy(wire, x, (size_t)length * sizeof *wire);
    memset(wire + length, 0, (size_t)padding * sizeof *wire);
    if (s->x)
        for (int64_t i = 0; i < length; i++) s->x[start + i] = hvd_left(s->x[start + i], wire[i] + 0.0f);
}

static void encode_tensor(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_segment *s = job->bucket->segments + number;
    const int64_t blocks = (s->size - 1) / s->length + 1;
    const float *judged = job->judged + s->blocks * job->numbers, *scores = judged;
    if (job->numbers > 1) {
        float *norms = job->scores + s->blocks;
        for (int64_t i = 0; i < blocks; i++)
            norms[i] = (float)sqrt(hvd_sum_of_squares(judged + i * job->numbers, job->numbers));
        scores = norms;
    }
    uint32_t low = 0, high = hvd_largest_bits(scores, blocks, 0) + 1; /* `count` scores or more reach low, fewer high */
    int64_t above = 0;                                                /* number of scores that reach high */
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const int64_t reaching = hvd_count(scores, blocks, middle);
        if (reaching >= s->count) low = middle;
        else {
            high = middle;
            above = reaching;
        }
    }
    int64_t *chosen = job->chosen + s->chosen, equal = s->count - above, sent = 0;
    for (int64_t i = 0; i < blocks; i++) {
        const uint32_t score = hvd_magnitude(scores[i]);
        if (score < low || (score == low && equal-- <= 0)) continue;
        send(job, s, i, s->taken + sent * s->length);
        chosen[sent++] = i;
    }
}

void HVD_NAME(together_encode)(
    hvd_bucket *bucket, const float *judged, int64_t numbers, float *scores, int64_t *chosen, void *wire, int32_t half
) {
    struct job job = {
        .bucket = bucket, .judged = judged, .numbers = numbers, .scores = scores, .chosen = chosen, .wire = wire,
        .half = half
    };
    hvd_parallel(bucket->threads, bucket->segment_count, encode_tensor, &job);
}

static void decode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t length = s->length, start = task->start * length, *chosen = job->chosen + s->chosen;
    uint32_t largest = 0;
    memset(s->result + start, 0, (size_t)(end_of(s, task) - start) * sizeof *s->result);
    int64_t i = 0;
    for (int64_t high = s->count; i < high;) { /* finds the first sent block of the task */
        const int64_t middle = (i + high) / 2;
        if (chosen[middle] < task->start) i = middle + 1;
        else high = middle;
    }
    for (; i < s->count && chosen[i] < task->start + task->length; i++) {
        const int64_t place = s->taken + i * length;
        float *result = s->result + chosen[i] * length;
        const int64_t elements = hvd_shorter(length, s->size - chosen[i] * length);
        if (job->half) hvd_from_halves((const uint16_t *)job->wire + place, elements, result);
        else memcpy(result, (const float *)job->wire + place, (size_t)elements * sizeof *result);
        for (int64_t j = 0; j < elements; j++) result[j] += 0.0f; /* turns -0.0 into 0.0, as in a sum with zeros */
        largest = hvd_largest_bits(result, elements, largest);
    }
    largest = hvd_put(job->bucket, s, start, end_of(s, task) - start, s->result + start, 0, largest);
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(together_decode)(
    hvd_bucket *bucket, hvd_task *tasks, int64_t count, void *mean, int64_t *chosen, int32_t half
) {
    struct job job = {.bucket = bucket, .tasks = tasks, .wire = mean, .half = half, .chosen = chosen};
    hvd_parallel(bucket->threads, count, decode_piece, &job);
    return hvd_any_found(tasks, count);
}
