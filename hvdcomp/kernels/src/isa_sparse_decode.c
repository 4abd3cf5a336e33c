/* Computes the mean of the elements that the ranks sent, and the residual in x. The mean is computed block by block, so
 * that the elements of all ranks are added while the block is in a cache. */
#include "half.h"
#include "isa.h"
#include "put.h"
#include "sparse.h"

#define BLOCK_BITS 16

struct job {
    const hvd_bucket *bucket;
    const uint8_t *payloads;
    int64_t ranks, row;
    int32_t type, masking; /* type: type of sent values, as in half.h */
};

static int64_t index_at(const uint8_t *indices, int64_t width, int64_t place) {
    int64_t index = 0;
    memcpy(&index, indices + width * place, (size_t)width);
    return index;
}

/* The number of ascending indices below `bound`. */
static int64_t below(const uint8_t *indices, int64_t width, int64_t count, int64_t bound) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (index_at(indices, width, middle) < bound) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int64_t sum_of_counts(const uint8_t *counts, int64_t blocks) {
    int64_t sum = 0;
    for (int64_t i = 0; i < blocks; i++) {
        int32_t count;
        memcpy(&count, counts + 4 * i, sizeof count);
        sum += count;
    }
    return sum;
}

/* The elements that a rank sent for a task. */
struct elements {
    const uint8_t *values, *indices;
    int64_t from, end; /* range among the tensor's elements in the payload */
    int64_t width, start;
    int32_t type;
};

static struct elements elements_of(const struct job *job, const hvd_task *task, int64_t rank) {
    const hvd_segment *s = job->bucket->segments + task->segment;
    const uint8_t *payload = job->payloads + rank * job->row;
    struct elements found = {
        .values = payload + s->values, .indices = payload + s->indices, .width = s->index_bytes, .type = job->type
    };
    found.start = found.width == 2 ? 0 : task->start; /* indices of two bytes count from the start of the task */
    if (s->block_counts >= 0) {
        const int64_t block = task->start >> BLOCK_BITS;
        found.from = sum_of_counts(payload + s->block_counts, block);
        found.end = found.from + sum_of_counts(payload + s->block_counts + 4 * block, 1);
    } else if (task->length == s->size)
        found.end = s->count;
    else {
        found.from = below(found.indices, found.width, s->count, task->start);
        found.end = below(found.indices, found.width, s->count, task->start + task->length);
    }
    return found;
}

static inline float value_at(const struct elements *e, int64_t i) {
    if (e->type) {
        uint16_t number;
        memcpy(&number, e->values + 2 * i, sizeof number);
        return hvd_of_16_bits(number, e->type);
    }
    float value;
    memcpy(&value, e->values + 4 * i, sizeof value);
    return value;
}

/* The place of an element in its task. */
static inline int64_t place_at(const struct elements *e, int64_t i) {
    if (e->width != 2) return index_at(e->indices, e->width, i) - e->start;
    uint16_t place;
    memcpy(&place, e->indices + 2 * i, sizeof place);
    return place;
}

static void decode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const float share = (float)(1.0 / (double)job->ranks);
    const hvd_segment *s = job->bucket->segments + task->segment;
    float room[1 << BLOCK_BITS]; /* used because a plain store to memory first reads the cache line */
    float *result = s->narrow ? room : s->result + task->start;
    uint32_t largest = 0;
    memset(result, 0, (size_t)task->length * sizeof *result);
    for (int64_t rank = 0; rank < job->ranks; rank++) {
        const struct elements e = elements_of(job, task, rank);
        for (int64_t i = e.from; i < e.end; i++) {
            float *sum = result + place_at(&e, i);
            *sum += value_at(&e, i) * share;
            largest = hvd_magnitude(*sum) > largest ? hvd_magnitude(*sum) : largest;
        }
    }
    largest = hvd_put(job->bucket, s, task->start, task->length, result, 0, largest);
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(sparse_decode)(hvd_bucket *bucket, const uint8_t *payloads, int64_t ranks, int64_t row, int32_t type) {
    struct job job = {.bucket = bucket, .payloads = payloads, .ranks = ranks, .row = row, .type = type};
    hvd_parallel(bucket->threads, bucket->task_count, decode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static void keep_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const struct elements e = elements_of(job, task, 0);
    float *x = s->x + task->start;
    for (int64_t i = e.from; i < e.end; i++) x[place_at(&e, i)] -= value_at(&e, i);
    if (!job->masking || !s->next_velocity) return;
    float *velocity = s->next_velocity + task->start;
    for (int64_t i = e.from; i < e.end; i++) velocity[place_at(&e, i)] = 0;
}

void HVD_NAME(sparse_keep)(hvd_bucket *bucket, const uint8_t *payload, int32_t type, int32_t masking) {
    struct job job = {.bucket = bucket, .payloads = payload, .ranks = 1, .type = type, .masking = masking};
    hvd_parallel(bucket->threads, bucket->task_count, keep_piece, &job);
}
