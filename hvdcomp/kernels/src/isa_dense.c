/* Kernels without compression. They compute x, copy uncompressed gradients, and compute sums of squares. */
#include "isa.h"
#include "make.h"
#include "put.h"

struct job {
    const hvd_bucket *bucket;
    float *wire;
    const float *mean;
    int large, adds, puts;
};

static void make_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    uint32_t largest = 0;
    task->sums[0] = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t start = task->start + done, length = hvd_shorter(task->length - done, HVD_BLOCK);
        const float *x = hvd_x(job->bucket, s, start, length, &largest);
        if (!job->wire) task->sums[0] += hvd_energy(x, length);
        else hvd_copy(job->wire + s->values + start, x, length, job->large);
    }
    hvd_fence();
    task->counts[0] = largest >= HVD_INFINITE;
}

/* Adds the sums of each tensor's pieces. */
static void add_up(hvd_bucket *bucket) {
    for (int64_t i = 0; i < bucket->segment_count; i++) bucket->segments[i].sums[0] = 0;
    for (int64_t i = 0; i < bucket->task_count; i++)
        bucket->segments[bucket->tasks[i].segment].sums[0] += bucket->tasks[i].sums[0];
}

int32_t HVD_NAME(make_x)(hvd_bucket *bucket) {
    struct job job = {.bucket = bucket};
    hvd_parallel(bucket->threads, bucket->task_count, make_piece, &job);
    add_up(bucket);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

int32_t HVD_NAME(dense_encode)(hvd_bucket *bucket, float *wire) {
    struct job job = {.bucket = bucket, .wire = wire, .large = hvd_is_large(bucket)};
    hvd_parallel(bucket->threads, bucket->task_count, make_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static void copy_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const float *mean = job->mean + s->values + task->start;
    uint32_t largest = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t length = hvd_shorter(task->length - done, HVD_BLOCK);
        largest = hvd_largest_bits(mean + done, length, largest);
        largest = hvd_put(job->bucket, s, task->start + done, length, mean + done, job->large, largest);
    }
    hvd_fence();
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(dense_decode)(hvd_bucket *bucket, const float *mean) {
    struct job job = {.bucket = bucket, .mean = mean, .large = hvd_is_large(bucket)};
    hvd_parallel(bucket->threads, bucket->task_count, copy_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static void keep_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const float *left = job->mean + s->values + task->start;
    float *x = s->x + task->start;
    if (s->source && s->source != s->x)
        for (int64_t i = 0; i < task->length; i++) x[i] = left[i] + (x[i] - s->source[task->start + i]);
    else
        memcpy(x, left, (size_t)task->length * sizeof *x);
}

void HVD_NAME(dense_keep)(hvd_bucket *bucket, const float *left) {
    struct job job = {.bucket = bucket, .mean = left};
    hvd_parallel(bucket->threads, bucket->task_count, keep_piece, &job);
}

static void narrow_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const float *mean = s->result + task->start;
    task->counts[0] = hvd_put(job->bucket, s, task->start, task->length, mean, 0, 0) >= HVD_INFINITE;
}

int32_t HVD_NAME(narrow_results)(hvd_bucket *bucket) {
    struct job job = {.bucket = bucket};
    hvd_parallel(bucket->threads, bucket->task_count, narrow_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static void add_piece(const hvd_segment *s, const hvd_task *task, float share) {
    float *restrict total = s->total + task->start;
    if (!s->narrow) {
        const float *restrict gradient = s->gradient + task->start;
        for (int64_t i = 0; i < task->length; i++) total[i] += gradient[i] * share;
        return;
    }
    float gradient[HVD_WIDENED];
    for (int64_t done = 0; done < task->length; done += HVD_WIDENED) {
        const int64_t length = hvd_shorter(HVD_WIDENED, task->length - done);
        hvd_widened(s->gradient, s->narrow, task->start + done, length, gradient);
        for (int64_t i = 0; i < length; i++) total[done + i] += gradient[i] * share;
    }
}

static void put_piece(const hvd_segment *s, const hvd_task *task, int large) {
    if (s->narrow) {
        uint16_t *gradient = (uint16_t *)(void *)s->gradient;
        memcpy(gradient + task->start, s->narrowed + task->start, (size_t)task->length * sizeof *gradient);
    } else
        hvd_copy((float *)s->gradient + task->start, s->result + task->start, task->length, large);
}

static void end_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    if (job->adds) add_piece(s, task, job->bucket->share);
    if (job->puts) put_piece(s, task, job->large);
    hvd_fence();
}

void HVD_NAME(end_step)(hvd_bucket *bucket, int32_t adds, int32_t puts) {
    struct job job = {.bucket = bucket, .adds = adds, .puts = puts, .large = hvd_is_large(bucket)};
    hvd_parallel(bucket->threads, bucket->task_count, end_piece, &job);
}

static void left_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment left = hvd_unsent(job->bucket->segments + task->segment);
    float block[HVD_BLOCK];
    task->sums[0] = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t length = hvd_shorter(task->length - done, HVD_BLOCK);
        HVD_NAME(residual)(&left, left.kept + task->start + done, task->start + done, length, 1, block);
        task->sums[0] += hvd_energy(block, length);
    }
}

void HVD_NAME(measure_left)(hvd_bucket *bucket) {
    struct job job = {.bucket = bucket};
    hvd_parallel(bucket->threads, bucket->task_count, left_piece, &job);
    add_up(bucket);
}

static void round_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment left = hvd_unsent(job->bucket->segments + task->segment);
    const float bound = left.kept_type == HVD_HALF ? HVD_LARGEST_HALF : HVD_LARGEST_BFLOAT16;
    float block[HVD_WIDENED];
    for (int64_t done = 0; done < task->length; done += HVD_WIDENED) {
        const int64_t start = task->start + done, length = hvd_shorter(task->length - done, HVD_WIDENED);
        HVD_NAME(residual)(&left, left.kept + start, start, length, 1, block);
        for (int64_t i = 0; i < length; i++)
            block[i] = block[i] > bound ? bound : block[i] < -bound ? -bound : block[i];
        hvd_narrow(block, length, (int32_t)left.kept_type, left.rounded + start);
    }
}

void HVD_NAME(round_left)(hvd_bucket *bucket) {
    struct job job = {.bucket = bucket};
    hvd_parallel(bucket->threads, bucket->task_count, round_piece, &job);
}
