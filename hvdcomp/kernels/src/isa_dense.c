/* Kernels that change nothing of what is sent: x itself, and gradients that travel as they are. */
#include "bucket.h"
#include "isa.h"
#include "stream.h"

struct job {
    const hvd_bucket *bucket;
    float *wire;
    const float *mean;
    int large;
};

static void make_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    uint32_t largest = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t start = task->start + done, length = hvd_shorter(task->length - done, HVD_BLOCK);
        const float *x = hvd_x(job->bucket, s, start, length, &largest);
        if (job->wire) hvd_copy(job->wire + s->place[0] + start, x, length, job->large);
    }
    hvd_fence();
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(make_x)(hvd_bucket *bucket) {
    struct job job = {.bucket = bucket};
    hvd_parallel(bucket->threads, bucket->task_count, make_piece, &job);
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
    const float *mean = job->mean + s->place[0] + task->start;
    float *result = s->result + task->start;
    uint32_t largest = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t length = hvd_shorter(task->length - done, HVD_BLOCK);
        largest = hvd_largest_bits(mean + done, length, largest);
        hvd_copy(result + done, mean + done, length, job->large);
    }
    hvd_fence();
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(dense_decode)(hvd_bucket *bucket, const float *mean) {
    struct job job = {.bucket = bucket, .mean = mean, .large = hvd_is_large(bucket)};
    hvd_parallel(bucket->threads, bucket->task_count, copy_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static void put_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    hvd_copy((float *)s->gradient + task->start, s->result + task->start, task->length, job->large);
    hvd_fence();
}

void HVD_NAME(put_results)(hvd_bucket *bucket) {
    struct job job = {.bucket = bucket, .large = hvd_is_large(bucket)};
    hvd_parallel(bucket->threads, bucket->task_count, put_piece, &job);
}
