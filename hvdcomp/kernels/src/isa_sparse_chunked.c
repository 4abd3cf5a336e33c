/* The largest elements of each chunk of neighboring elements: encodes them, and computes their mean over the ranks.
 *
 * A full chunk sends `sent_of_chunk` elements, and a tensor sends `count` elements. In the payload, `values` is the
 * start of the tensor's values, or of four means of its values, or of their mean magnitude. The packed places of the
 * values in their chunks begin at `indices`: first the low eight bits, then the higher bits. For each value, the packed
 * number of its mean, or its sign, follows. Before values and places are packed, they are in arrays for all tensors, in
 * which the tensor's part begins at `found`. Tasks consist of whole chunks: their start and length count chunks. */
#include <math.h>

#include "collect.h"
#include "half.h"
#include "isa.h"
#include "make.h"
#include "packing.h"
#include "put.h"

#define CANDIDATES 1024
#define FEW 64 /* up to this number of elements, all are compared to find the largest */

struct job {
    const hvd_bucket *bucket;
    hvd_task *tasks;
    int64_t chunk;
    int32_t how, masking;
    float *values;
    uint16_t *places;
    uint8_t *wire;
    const uint8_t *payloads;
    int64_t ranks, row;
};

/* Addresses of a tensor's packed codes. */
struct codes {
    uint8_t *low, *high, *bins;
    int bits, of_bins; /* bits of a place; bits of the number of a mean */
};

static int64_t packed_bytes(int64_t count, int bits) {
    int64_t bytes = 0;
    for (int width = 8; width; width /= 2)
        if (bits & width) bytes += (count * width + 7) / 8;
    return bytes;
}

static struct codes codes_of(const struct job *job, const hvd_segment *s, uint8_t *payload) {
    const int of_bins = job->how == HVD_FOUR_MEANS ? 2 : job->how == HVD_IN_SIGN ? 1 : 0;
    struct codes found = {.low = payload + s->indices, .bits = 1, .of_bins = of_bins};
    while ((hvd_shorter(job->chunk, s->size) - 1) >> found.bits) found.bits++;
    found.high = found.low + packed_bytes(s->count, found.bits < 8 ? found.bits : 8);
    found.bins = found.high + (found.bits > 8 ? packed_bytes(s->count, found.bits - 8) : 0);
    return found;
}

/* A group of codes, with the room that packing needs. */
struct group {
    uint8_t low[HVD_GROUP + 8], high[HVD_GROUP + 8], bins[HVD_GROUP + 8];
};

static void pack(struct codes to, struct group *group, int64_t size, int64_t start, int unpacks) {
    const int64_t length = hvd_shorter(HVD_GROUP, size - start);
    hvd_pack(group->low, to.low, size, start, length, to.bits < 8 ? to.bits : 8, unpacks);
    if (to.bits > 8) hvd_pack(group->high, to.high, size, start, length, to.bits - 8, unpacks);
    hvd_pack(group->bins, to.bins, size, start, length, to.of_bins, unpacks);
}

/* Finds the `count` largest elements of a chunk, in index order. Among equal elements, the first ones are taken. As
 * soon as only a few elements (at least `count`) reach a bound, the search reads only these.
 *
 * guess: the first bound to try; 0 for none.
 * largest: bits that no magnitude exceeds.
 * Returns: the bits of the smallest magnitude that is taken. */
static uint32_t choose(
    const float *x, int64_t length, int64_t count, uint32_t guess, uint32_t largest, float *values, uint16_t *places
) {
    float candidates[CANDIDATES + HVD_SLACK];
    uint16_t of_candidates[CANDIDATES + HVD_SLACK];
    const float *from = x;
    uint32_t low = 0, high = largest + 1; /* at least `count` elements reach low, fewer reach high */
    int64_t above = 0;                    /* number of elements that reach high */
    while (high - low > 1) {
        const uint32_t middle = guess ? guess : low + (high - low) / 2;
        const int64_t reaching = hvd_count(from, length, middle);
        guess = 0;
        if (reaching < count) {
            high = middle;
            above = reaching;
            continue;
        }
        low = middle;
        if (reaching == count) break;
        if (from != x || reaching > CANDIDATES || reaching > 8 * count) continue;
        length = hvd_collect(x, length, low, 0, candidates, of_candidates);
        from = candidates;
    }
    int64_t equal = count - above, taken = 0;
    for (int64_t i = 0; i < length && taken < count; i++) {
        const uint32_t magnitude = hvd_magnitude(from[i]);
        values[taken] = from[i];
        places[taken] = from == x ? (uint16_t)i : of_candidates[i];
        taken += (magnitude > low) | ((magnitude == low) & (equal > 0)); /* a branch would often be mispredicted */
        equal -= magnitude == low;
    }
    return low;
}

/* `choose` for a single element. */
static void choose_one(const float *x, int64_t length, float *value, uint16_t *place) {
    uint32_t largest = hvd_magnitude(x[0]);
    int64_t at = 0;
    for (int64_t i = 1; i < length; i++) {
        const uint32_t magnitude = hvd_magnitude(x[i]);
        at = magnitude > largest ? i : at;
        largest = magnitude > largest ? magnitude : largest;
    }
    *value = x[at];
    *place = (uint16_t)at;
}

static void choose_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t chunk = job->chunk, k = s->sent_of_chunk;
    const int64_t end = hvd_shorter((task->start + task->length) * chunk, s->size);
    const int64_t step = chunk < HVD_BLOCK ? HVD_BLOCK / chunk * chunk : chunk; /* whole chunks that fit in a cache */
    int64_t place = s->found + task->start * k, made = task->start * chunk;     /* made: end of the part of x so far */
    uint32_t largest = 0, least = 0;
    for (int64_t start = made; start < end; start += chunk) {
        const int64_t length = hvd_shorter(chunk, end - start), count = (k * length + chunk - 1) / chunk;
        if (start == made) {
            made = hvd_shorter(start + step, end);
            for (int64_t i = start; i < made; i += HVD_BLOCK)
                hvd_x(job->bucket, s, i, hvd_shorter(HVD_BLOCK, made - i), &largest);
        }
        if (count == 1 && length <= FEW) {
            choose_one(hvd_made(s, start), length, job->values + place, job->places + place);
            place++;
            continue;
        }
        /* The guess is slightly below the smallest magnitude that the previous chunk sent, or half the largest
         * magnitude. In most chunks, enough elements are above it. */
        const uint32_t near = least ? least : largest, less = least ? 1u << 21 : 1u << 23;
        const uint32_t guess = near > less ? near - less : 0;
        least = choose(hvd_made(s, start), length, count, guess, largest, job->values + place, job->places + place);
        place += count;
    }
    task->counts[0] = largest >= HVD_INFINITE;
}

/* The means that replace a tensor's values. `_to_bins` and `to_signs` in Python compute the same means. */
struct means {
    double centre, bounds[3];
    float of[4];
};

static int bin_of(const struct means *means, float value) {
    const double centred = value - means->centre;
    return (centred >= means->bounds[0]) + (centred >= means->bounds[1]) + (centred >= means->bounds[2]);
}

#define LANES 8

static double sum_of(const double *lanes) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

static struct means signed_of(float magnitude) { return (struct means){.of = {-magnitude, magnitude}}; }

static float mean_magnitude(const float *values, int64_t count) {
    double sum[LANES] = {0};
    for (int64_t i = 0; i < count; i += LANES)
        for (int lane = 0; lane < LANES && i + lane < count; lane++) sum[lane] += __builtin_fabsf(values[i + lane]);
    return (float)(sum_of(sum) * (1 / (double)count));
}

static struct means four_of(const float *values, int64_t count) {
    double sum[LANES] = {0}, squares[LANES] = {0}, sums[4][LANES] = {{0}}, numbers[4][LANES] = {{0}};
    struct means found;
    for (int64_t i = 0; i < count; i += LANES)
        for (int lane = 0; lane < LANES && i + lane < count; lane++) sum[lane] += values[i + lane];
    found.centre = sum_of(sum) / (double)count;
    for (int64_t i = 0; i < count; i += LANES)
        for (int lane = 0; lane < LANES && i + lane < count; lane++) {
            const double centred = values[i + lane] - found.centre;
            squares[lane] += centred * centred;
        }
    const double sigma = sqrt(sum_of(squares)) / sqrt((double)count);
    for (int i = 0; i < 3; i++) found.bounds[i] = (1.5 * i - 2.25) * sigma;
    for (int64_t i = 0; i < count; i++) {
        const int bin = bin_of(&found, values[i]), lane = (int)(i % LANES);
        sums[bin][lane] += values[i];
        numbers[bin][lane]++;
    }
    for (int i = 0; i < 4; i++) {
        const double number = sum_of(numbers[i]);
        found.of[i] = number > 0 ? (float)(sum_of(sums[i]) * (1 / number)) : 0;
    }
    return found;
}

/* Walks through the places of a tensor's sent elements. */
struct walk {
    int64_t chunk, k, start, left; /* start of the current chunk; number of its elements that remain */
};

static int64_t next_start(struct walk *walk) {
    if (walk->left == 0) {
        walk->start += walk->chunk;
        walk->left = walk->k;
    }
    walk->left--;
    return walk->start;
}

static void pack_tensor(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_segment *s = job->bucket->segments + number;
    const float *values = job->values + s->found;
    const uint16_t *places = job->places + s->found;
    const struct codes codes = codes_of(job, s, job->wire);
    struct group group = {0};
    struct means means = {0};
    struct walk walk = {job->chunk, s->sent_of_chunk, 0, s->sent_of_chunk};
    uint8_t *wire = job->wire + s->values;
    const int how = job->how;
    float *x = s->x, *velocity = job->masking ? s->next_velocity : NULL;
    if (how == HVD_FOUR_MEANS) {
        means = four_of(values, s->count);
        memcpy(wire, means.of, sizeof means.of);
    } else if (how == HVD_IN_SIGN) {
        means = signed_of(mean_magnitude(values, s->count));
        memcpy(wire, means.of + 1, sizeof(float));
    } else if (how == HVD_IN_FLOAT) memcpy(wire, values, (size_t)s->count * sizeof *values);
    for (int64_t i = 0, count = s->count; i < count; i++) {
        const int64_t index = next_start(&walk) + places[i], at = i % HVD_GROUP;
        float sent = values[i];
        group.low[at] = (uint8_t)places[i];
        group.high[at] = (uint8_t)(places[i] >> 8);
        if (codes.of_bins) {
            group.bins[at] = (uint8_t)(how == HVD_IN_SIGN ? sent >= 0 : bin_of(&means, sent));
            sent = means.of[group.bins[at]];
        } else if (how == HVD_IN_HALF) {
            const uint16_t half = hvd_to_half(hvd_within_half(sent));
            memcpy(wire + 2 * i, &half, sizeof half);
            sent = hvd_from_half(half);
        }
        if (x) x[index] = hvd_left(x[index], sent);
        if (velocity) velocity[index] = 0;
        if (at < HVD_GROUP - 1 && i < count - 1) continue;
        memset(group.low + at + 1, 0, 7);
        memset(group.high + at + 1, 0, 7);
        memset(group.bins + at + 1, 0, 7);
        pack(codes, &group, count, i - at, 0);
    }
}

int32_t HVD_NAME(chunks_encode)(
    hvd_bucket *bucket, hvd_task *tasks, int64_t count, int64_t chunk, int32_t how, int32_t masking, float *values,
    uint16_t *places, uint8_t *wire
) {
    struct job job = {bucket, tasks, chunk, how, masking, values, places, wire, NULL, 0, 0};
    hvd_parallel(bucket->threads, count, choose_piece, &job);
    hvd_parallel(bucket->threads, bucket->segment_count, pack_tensor, &job);
    return hvd_any_found(tasks, count);
}

/* Adds the values that one rank sent, multiplied by `share`, to the elements `result` of a task. */
static uint32_t add_rank(
    const struct job *job, const hvd_task *task, uint8_t *payload, float share, uint32_t largest, float *result
) {
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t k = s->sent_of_chunk, first = task->start * k;
    const int64_t end = hvd_shorter(first + task->length * k, s->count);
    const struct codes codes = codes_of(job, s, payload);
    const uint8_t *values = payload + s->values;
    struct group group;
    struct walk walk = {job->chunk, k, 0, k};
    struct means means = {0};
    if (job->how == HVD_FOUR_MEANS) memcpy(means.of, values, sizeof means.of);
    else if (job->how == HVD_IN_SIGN) {
        float magnitude;
        memcpy(&magnitude, values, sizeof magnitude);
        means = signed_of(magnitude);
    }
    for (int64_t i = first; i < end; i++) {
        const int64_t at = i % HVD_GROUP;
        if (i == first || at == 0) pack(codes, &group, s->count, i - at, 1);
        const int place = codes.bits > 8 ? group.low[at] | group.high[at] << 8 : group.low[at];
        float value;
        if (codes.of_bins) value = means.of[group.bins[at]];
        else if (job->how == HVD_IN_FLOAT) memcpy(&value, values + 4 * i, sizeof value);
        else {
            uint16_t half;
            memcpy(&half, values + 2 * i, sizeof half);
            value = hvd_from_half(half);
        }
        float *sum = result + next_start(&walk) + place;
        *sum += value * share;
        largest = hvd_magnitude(*sum) > largest ? hvd_magnitude(*sum) : largest;
    }
    return largest;
}

static void decode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t start = task->start * job->chunk, length = hvd_shorter(task->length * job->chunk, s->size - start);
    const float share = (float)(1.0 / (double)job->ranks);
    float room[HVD_CHUNK_PIECE]; /* for means that are then rounded to 16 bits */
    float *result = s->narrow ? room : s->result + start;
    uint32_t largest = 0;
    memset(result, 0, (size_t)length * sizeof *result);
    for (int64_t rank = 0; rank < job->ranks; rank++)
        largest = add_rank(job, task, (uint8_t *)job->payloads + rank * job->row, share, largest, result);
    largest = hvd_put(job->bucket, s, start, length, result, 0, largest);
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(chunks_decode)(
    hvd_bucket *bucket, hvd_task *tasks, int64_t count, int64_t chunk, int32_t how, const uint8_t *payloads,
    int64_t ranks, int64_t row
) {
    struct job job = {
        .bucket = bucket, .tasks = tasks, .chunk = chunk, .how = how, .payloads = payloads, .ranks = ranks, .row = row
    };
    hvd_parallel(bucket->threads, count, decode_piece, &job);
    return hvd_any_found(tasks, count);
}
