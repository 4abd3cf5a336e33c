/* Signs that are decoded to one of two values (EF-SignSGD, one-bit SGD), and signs that vote.
 *
 * Element i of a tensor is bit i % 8 of byte i / 8. A tensor's bits begin at `signs` of a payload.
 * Bytes are in the order of a little-endian machine. */
#include "bucket.h"
#include "isa.h"
#include "lanes.h"
#include "make.h"
#include "masks.h"
#include "put.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bits are packed for a little-endian machine"
#endif

struct job {
    const hvd_bucket *bucket;
    uint8_t *payload;
    const uint8_t *payloads;
    int64_t ranks, row; /* row: bytes of a rank's payload */
    int64_t rule;
    uint8_t *votes;
    int64_t zero_is_positive;
    int large;
};

/* Signs with two values. */

/* Adds each magnitude divided by the tensor's size to a sum: to `sums[1]` for elements > 0 if `apart`, otherwise to
 * `sums[0]`. Magnitudes are divided before they are added, so that no sum overflows. */
HVD_INLINE void add_shares(const float *x, int64_t length, float share, int apart, double sums[2]) {
    hvd_vector vectors[2][HVD_PARTS] = {{{0}}};
    float lanes[2][HVD_LANES];
    int64_t i = 0;
    for (; i + HVD_LANES <= length; i += HVD_LANES)
        for (int part = 0; part < HVD_PARTS; part++) {
            const hvd_vector value = hvd_load(x + i + part * HVD_WIDTH);
            const hvd_vector addend = (hvd_vector)((hvd_bits_vector)value & 0x7fffffff) * share;
            const hvd_bits_vector upper = apart ? value > 0 : (hvd_bits_vector){0};
            vectors[0][part] += (hvd_vector)((hvd_bits_vector)addend & ~upper);
            vectors[1][part] += (hvd_vector)((hvd_bits_vector)addend & upper);
        }
    memcpy(lanes, vectors, sizeof lanes);
    for (; i < length; i++) lanes[apart && x[i] > 0][i % HVD_LANES] += __builtin_fabsf(x[i]) * share;
    for (int lane = 0; lane < HVD_LANES; lane++) {
        sums[0] += lanes[0][lane];
        sums[1] += lanes[1][lane];
    }
}

static void encode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const float share = 1.0f / (float)s->size;
    const int strictly = job->rule == HVD_POSITIVE;
    uint8_t *bits = job->payload + s->signs;
    uint32_t largest = 0;
    int64_t above = 0;
    task->sums[0] = task->sums[1] = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t start = task->start + done, length = hvd_shorter(task->length - done, HVD_BLOCK);
        const float *x = hvd_x(job->bucket, s, start, length, &largest);
        if (strictly) add_shares(x, length, share, 1, task->sums);
        else add_shares(x, length, share, 0, task->sums);
        for (int64_t i = 0; i < length; i += 64) {
            const uint64_t mask = hvd_positive(x + i, hvd_shorter(length - i, 64), strictly);
            above += __builtin_popcountll(mask);
            hvd_store_bits(bits + (start + i) / 8, mask, hvd_shorter(length - i, 64));
        }
    }
    task->counts[0] = largest >= HVD_INFINITE;
    task->counts[1] = above;
}

int32_t HVD_NAME(two_values_encode)(hvd_bucket *bucket, int64_t rule, uint8_t *payload) {
    struct job job = {.bucket = bucket, .payload = payload, .rule = rule};
    hvd_parallel(bucket->threads, bucket->task_count, encode_piece, &job);
    const hvd_task *task = bucket->tasks, *end = bucket->tasks + bucket->task_count;
    for (int64_t i = 0; i < bucket->segment_count; i++) {
        hvd_segment *s = bucket->segments + i;
        double rest = 0, upper = 0;
        int64_t above = 0;
        for (; task < end && task->segment == i; task++) {
            rest += task->sums[0];
            upper += task->sums[1];
            above += task->counts[1];
        }
        if (rule == HVD_POSITIVE) {
            const double size = (double)s->size;
            s->sent_above = above ? (float)(upper * (size / (double)above)) : 0;
            s->sent_below = above < s->size ? (float)(-rest * (size / (double)(s->size - above))) : 0;
            memcpy(payload + s->scales + sizeof(float), &s->sent_below, sizeof(float));
        } else {
            s->sent_above = (float)rest;
            s->sent_below = -s->sent_above;
        }
        memcpy(payload + s->scales, &s->sent_above, sizeof(float));
        s->sent_rule = (int32_t)rule;
    }
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static void choose(float *restrict out, uint32_t bits, int64_t length, float above, float below, int add) {
    if (add)
        for (int64_t i = 0; i < length; i++) out[i] += bits >> i & 1 ? above : below;
    else
        for (int64_t i = 0; i < length; i++) out[i] = bits >> i & 1 ? above : below;
}

static void decode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    float block[HVD_BLOCK];
    uint32_t largest = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t start = task->start + done, length = hvd_shorter(task->length - done, HVD_BLOCK);
        float *result = job->large || s->narrow ? block : s->result + start;
        for (int64_t rank = 0; rank < job->ranks; rank++) {
            const uint8_t *payload = job->payloads + rank * job->row, *bits = payload + s->signs + start / 8;
            float above, below;
            memcpy(&above, payload + s->scales, sizeof above);
            if (job->rule == HVD_POSITIVE) memcpy(&below, payload + s->scales + sizeof above, sizeof below);
            else below = -above;
            int64_t i = 0;
            for (; i + 32 <= length; i += 32) {
                uint32_t word;
                memcpy(&word, bits + i / 8, sizeof word);
                choose(result + i, word, 32, above, below, rank > 0);
            }
            if (i < length) {
                const uint32_t word = (uint32_t)hvd_load_bits(bits + i / 8, length - i);
                choose(result + i, word, length - i, above, below, rank > 0);
            }
        }
        largest = hvd_mean(result, length, job->ranks, largest);
        largest = hvd_put(job->bucket, s, start, length, result, 1, largest);
    }
    hvd_fence();
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(two_values_decode)(
    hvd_bucket *bucket, int64_t rule, const uint8_t *payloads, int64_t ranks, int64_t row
) {
    struct job job = {.bucket = bucket, .payloads = payloads, .ranks = ranks, .row = row, .rule = rule};
    job.large = hvd_is_large(bucket);
    hvd_parallel(bucket->threads, bucket->task_count, decode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

/* Votes. A tensor is a matrix of `count` columns. A payload has one bit for each row, from `row_votes` on, which tells
 * whether the row votes. The scratch memory has one byte for each row, from `votes` on. */

static void vote_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    uint8_t *bits = job->payload + s->signs, *votes = job->votes + s->votes;
    const int strictly = !job->zero_is_positive;
    float room[HVD_BLOCK];
    uint32_t largest = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t start = task->start + done, length = hvd_shorter(task->length - done, HVD_BLOCK);
        const int64_t end = start + length;
        const float *x = hvd_x_once(job->bucket, s, start, length, room, &largest);
        for (int64_t i = 0; i < length; i += 64) {
            const int64_t rest = hvd_shorter(length - i, 64);
            uint64_t mask = hvd_positive(x + i, rest, strictly);
            if (s->count == 1) {
                const uint64_t nonzero = hvd_nonzero(x + i, rest);
                hvd_store_bits(job->payload + s->row_votes + (start + i) / 8, nonzero, rest);
                mask &= nonzero;
            }
            hvd_store_bits(bits + (start + i) / 8, mask, rest);
        }
        if (s->count > 1)
            for (int64_t row = start / s->count, from = start; from < end; row++) {
                const int64_t to = hvd_shorter((row + 1) * s->count, end);
                /* A row may be in two pieces; then two threads write the same value. */
                if (hvd_largest_bits(x + (from - start), to - from, 0))
                    __atomic_store_n(votes + row, 1, __ATOMIC_RELAXED);
                from = to;
            }
    }
    task->counts[0] = largest >= HVD_INFINITE;
}

/* Clears the bits of rows that do not vote (their elements are all zero), and packs the votes. */
static void close_votes(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_segment *s = job->bucket->segments + number;
    if (s->count == 1) return;
    uint8_t *bits = job->payload + s->signs, *packed = job->payload + s->row_votes;
    const uint8_t *votes = job->votes + s->votes;
    const int64_t rows = s->size / s->count;
    memset(packed, 0, (size_t)(rows + 7) / 8);
    for (int64_t row = 0; row < rows; row++) {
        packed[row / 8] |= (uint8_t)(votes[row] << (row % 8));
        if (!votes[row] && job->zero_is_positive)
            for (int64_t i = row * s->count; i < (row + 1) * s->count; i++) bits[i / 8] &= (uint8_t)~(1u << (i % 8));
    }
}

int32_t HVD_NAME(votes_encode)(
    hvd_bucket *bucket, int64_t zero_is_positive, uint8_t *payload, uint8_t *votes, int64_t rows
) {
    struct job job = {.bucket = bucket, .payload = payload, .votes = votes, .zero_is_positive = zero_is_positive};
    memset(votes, 0, (size_t)rows);
    hvd_parallel(bucket->threads, bucket->task_count, vote_piece, &job);
    hvd_parallel(bucket->threads, bucket->segment_count, close_votes, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

/* The number of ranks whose bit `place` is set. */
static int32_t count_bits(const struct job *job, int64_t begin, int64_t place) {
    int32_t count = 0;
    for (int64_t rank = 0; rank < job->ranks; rank++)
        count += job->payloads[rank * job->row + begin + place / 8] >> (place % 8) & 1;
    return count;
}

static void elect_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    int32_t positive[HVD_BLOCK];
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t start = task->start + done, length = hvd_shorter(task->length - done, HVD_BLOCK);
        const int64_t end = start + length;
        memset(positive, 0, sizeof positive);
        for (int64_t rank = 0; rank < job->ranks; rank++) {
            const uint8_t *bits = job->payloads + rank * job->row + s->signs + start / 8;
            for (int64_t i = 0; i < length; i += 32) {
                const uint32_t word = (uint32_t)hvd_load_bits(bits + i / 8, hvd_shorter(length - i, 32));
                for (int j = 0; j < 32; j++) positive[i + j] += word >> j & 1; /* a block consists of whole words */
            }
        }
        float *result = s->result + start;
        if (s->count == 1)
            for (int64_t i = 0; i < length; i++) {
                const int32_t balance = 2 * positive[i] - count_bits(job, s->row_votes, start + i);
                result[i] = (float)((balance > 0) - (balance < 0));
            }
        else
            for (int64_t row = start / s->count, from = start; from < end; row++) {
                const int64_t to = hvd_shorter((row + 1) * s->count, end);
                const int32_t votes = count_bits(job, s->row_votes, row);
                for (int64_t i = from - start; i < to - start; i++) {
                    const int32_t balance = 2 * positive[i] - votes;
                    result[i] = (float)((balance > 0) - (balance < 0));
                }
                from = to;
            }
        hvd_put(job->bucket, s, start, length, result, 0, 0);
    }
}

void HVD_NAME(votes_decode)(hvd_bucket *bucket, const uint8_t *payloads, int64_t ranks, int64_t row) {
    struct job job = {.bucket = bucket, .payloads = payloads, .ranks = ranks, .row = row};
    hvd_parallel(bucket->threads, bucket->task_count, elect_piece, &job);
}

/* Subtracts this rank's votes from x, if x is kept. */
static void keep_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const uint8_t *bits = job->payload + s->signs, *votes = job->payload + s->row_votes;
    for (int64_t i = task->start; i < task->start + task->length; i++) {
        const int64_t row = i / s->count;
        const int32_t vote = votes[row / 8] >> (row % 8) & 1, positive = bits[i / 8] >> (i % 8) & 1;
        s->x[i] -= (float)(2 * positive - vote);
    }
}

void HVD_NAME(votes_keep)(hvd_bucket *bucket, const uint8_t *payload) {
    struct job job = {.bucket = bucket, .payload = (uint8_t *)payload};
    hvd_parallel(bucket->threads, bucket->task_count, keep_piece, &job);
}
