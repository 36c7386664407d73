/* Decoding on a CPU: one step of the decoder for all hypotheses, from their last tokens to the best pieces that may follow, and the matrix products and
 * the attention that the encoder shares with it. `library.py` compiles this file for the processor it runs on, `kernels.py` calls it.
 *
 * Functions allocate nothing. Products are shared by as many threads as the caller's torch has (OpenMP), all else runs in the thread that calls. A result
 * for a row depends on that row alone, and NaN in it gives NaN.
 *
 * Shapes: R rows (positions or hypotheses), D = d_model, H heads, C = D / H, a multiple of 16, K inputs and N outputs of a product, V pieces, T steps.
 * Matrices are stored by rows; "ld" is the distance of two rows, in numbers, where they are parts of wider ones.
 */

#include "vector.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* ---- matrix products ---- */

/* y = x W^T + b, with weights arranged by `pack_fp32`, `pack_int8` or `pack_bf16`. Of 8-bit weights every output has a scale. Without matrix units the
 * processor multiplies bytes without sign by bytes with one, so 128 is added to the former, and `excess` is what that adds to a sum, 128 times the sum of
 * the weights of the output. */
struct linear {
    const void *weight;
    const float *scale, *bias, *excess; /* [N]; bias may be NULL */
    long inputs, outputs, kind;
};

enum { FP32 = 0, INT8 = 1, BF16 = 2 };

/* Room for rows that are rounded: R rounded up to 48 rows of as many bytes as `bytes_of_row` says, and one scale of each. */
struct rounded {
    int8_t *rows;
    float *scale;
};

enum { AMX = 3, VNNI = 2, AVX2 = 1, NONE = 0 };

/* How products of 8-bit integers are done here: by matrix units, by dot products, by pairs of products in 16 bits, or not at all. */
long int8_level(void)
{
#if defined(HAS_AMX)
    /* Ask Linux for the tile registers: arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA. */
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? AMX : NONE;
#elif defined(HAS_VNNI)
    return VNNI;
#elif defined(HAS_AVX2)
    return AVX2;
#else
    return NONE;
#endif
}

#define TILE 16           /* rows of a tile */
#define TILE_BYTES 64     /* of a row of a tile: the inputs that one product of tiles sums over */
#define PANEL (2 * LANES) /* outputs that are computed together, two registers of them */
#ifdef HAS_AMX
#define GROUP TILE
#else
#define GROUP PANEL
#endif
#ifdef HAS_AVX512
#define ROWS_OF_PANEL 8 /* for so many rows: as many sums as there are registers for */
#else
#define ROWS_OF_PANEL 6
#endif

INLINE long bytes_of_row(const struct linear *w) { return round_up(w->inputs * (w->kind == BF16 ? 2 : 1), TILE_BYTES); }

/* Whether there are products of bf16 by matrix units. */
long has_bf16(void)
{
#if defined(HAS_AMX_BF16)
    return int8_level() == AMX;
#else
    return 0;
#endif
}

/* Round weights [N, K] to integers up to `levels`, with a scale for each output, and arrange them by groups of outputs: of each four inputs in turn, the
 * weights of all outputs of the group, four bytes for each. With matrix units a group is 16 outputs, and 16 times four inputs are a tile.
 * packed has room for N and K rounded up to multiples of 32 and 64, and is zero at first. */
void pack_int8(const float *weight, long outputs, long inputs, long levels, int8_t *packed, float *scale, float *excess)
{
    const long padded_k = round_up(inputs, TILE_BYTES);
    for (long n = 0; n < outputs; n++, weight += inputs) {
        float most = 1e-12f, nan = 0.0f, sum = 0.0f;
        for (long k = 0; k < inputs; k++) {
            most = most < fabsf(weight[k]) ? fabsf(weight[k]) : most;
            nan += weight[k] - weight[k];
        }
        scale[n] = most / (float)levels + nan;
        for (long k = 0; k < inputs; k++) {
            const float rounded = rintf(weight[k] / scale[n]);
            if (rounded == rounded) /* not NaN, which the scale keeps */
                packed[n / GROUP * GROUP * padded_k + k / 4 * GROUP * 4 + n % GROUP * 4 + k % 4] = (int8_t)rounded;
            sum += rounded;
        }
        excess[n] = 128.0f * sum;
    }
}

#ifdef HAS_AMX_BF16
/* Round weights [N, K] to bf16, and arrange them in the same way by pairs of inputs. packed has room for N rounded up to 32, and K to 32. */
void pack_bf16(const float *weight, long outputs, long inputs, uint16_t *packed)
{
    const long padded_k = round_up(inputs, TILE_BYTES / 2);
    for (long n = 0; n < outputs; n++)
        for (long k = 0; k < inputs; k++)
            packed[n / GROUP * GROUP * padded_k + k / 2 * GROUP * 2 + n % GROUP * 2 + k % 2] = to_half(broadcast(weight[n * inputs + k]))[0];
}
#endif

INLINE vec finish(vec sums, vec factor, vec bias, long relu)
{
    const vec y = sums * factor + bias;
    return relu ? choose(y < broadcast(0.0f), broadcast(0.0f), y) : y;
}

/* Up to LANES numbers; of none, or fewer, nothing. */
INLINE void store_some(float *y, vec value, long count)
{
    if (count >= LANES)
        store(y, value);
    else
        for (long i = 0; i < count; i++)
            y[i] = value[i];
}

INLINE vec load_some(const float *x, long count)
{
    if (count >= LANES)
        return load(x);
    vec value = {0};
    for (long i = 0; i < count; i++)
        value[i] = x[i];
    return value;
}

/* ---- in fp32 ---- */

/* Arrange weights [N, K] by panels: of each input the weights of all its outputs. packed has room for N rounded up to 32, and is zero at first. */
void pack_fp32(const float *weight, long outputs, long inputs, float *packed)
{
    for (long n = 0; n < outputs; n++)
        for (long k = 0; k < inputs; k++)
            packed[n / PANEL * PANEL * inputs + k * PANEL + n % PANEL] = weight[n * inputs + k];
}

#define BYTES_AHEAD 4096 /* how far ahead weights are asked for: a page, since processors themselves do not look into the next one */

/* Ask for what the next panels have in the place of 4 bytes of each output. */
INLINE void ask_for_weights(const void *weights)
{
    for (long line = 0; line < PANEL * 4; line += 64)
        __builtin_prefetch((const char *)weights + BYTES_AHEAD + line);
}

/* The products of some rows, up to ROWS_OF_PANEL, with a panel. */
INLINE void multiply_panel_fp32(const long rows, const float *x, long ldx, const float *panel, long inputs, const vec *bias, long relu, float *y, long ldy,
                                long count)
{
    vec sums[ROWS_OF_PANEL][2] = {{{0}}};
    for (long k = 0; k < inputs; k++) {
        ask_for_weights(panel + k * PANEL);
        for (long i = 0; i < rows; i++)
            for (long j = 0; j < 2; j++)
                sums[i][j] += x[i * ldx + k] * load(panel + k * PANEL + j * LANES);
    }
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < 2; j++)
            store_some(y + i * ldy + j * LANES, finish(sums[i][j], broadcast(1.0f), bias[j], relu), count - j * LANES);
}

/* A statement that sees how many of `left` rows come next, ROWS_OF_PANEL at most, as a constant: only as many sums are formed as there are rows. */
#define FOR_NEXT_ROWS(left, statement)                          \
    switch ((left) < ROWS_OF_PANEL ? (left) : ROWS_OF_PANEL) {  \
        WITH_ROWS(1, statement) WITH_ROWS(2, statement) WITH_ROWS(3, statement) WITH_ROWS(4, statement) \
        WITH_ROWS(5, statement) WITH_ROWS(6, statement) WITH_ROWS(7, statement) WITH_ROWS(8, statement) \
    }
#define WITH_ROWS(n, statement)                                                  \
    case n: {                                                                    \
        enum { together = n < ROWS_OF_PANEL ? n : ROWS_OF_PANEL };               \
        statement;                                                               \
    } break;

static void multiply_fp32(const struct linear *w, const float *x, long ldx, long rows, long relu, float *y, long ldy)
{
    for (long n = 0; n < w->outputs; n += PANEL) {
        const float *panel = (const float *)w->weight + n * w->inputs;
        const long count = w->outputs - n;
        vec bias[2] = {{0}};
        for (long j = 0; w->bias != NULL && j < 2; j++)
            bias[j] = load_some(w->bias + n + j * LANES, count - j * LANES);
        for (long r = 0; r < rows; r += ROWS_OF_PANEL)
            FOR_NEXT_ROWS(rows - r, multiply_panel_fp32(together, x + r * ldx, ldx, panel, w->inputs, bias, relu, y + r * ldy + n, ldy, count))
    }
}

/* ---- in fewer bits ---- */

#ifdef HAS_AVX2
/* Round rows to integers of magnitude up to 127, with one scale each; without matrix units 128 is added. What lies behind a row counts as 0. */
static void round_to_int8(const float *x, long ldx, long rows, long k, struct rounded out)
{
    const long padded_k = round_up(k, TILE_BYTES), whole = k / LANES * LANES;
    for (long r = 0; r < rows; r++) {
        const float *row = x + r * ldx;
        int8_t *q = out.rows + r * padded_k;
        vec largest = broadcast(1e-12f), nan = {0};
        for (long i = 0; i < k; i += LANES) {
            const vec value = i < whole ? load(row + i) : load_some(row + i, k - i);
            const vec magnitude = (vec)((ints)value & 0x7fffffff);
            largest = larger(largest, magnitude);
            nan += value - value; /* NaN too if a number is infinite: its product with others is not known either */
        }
        const float most = largest_of(largest) + sum_of(nan);
        for (long i = 0; i < padded_k; i += LANES) {
            const vec value = (i < whole ? load(row + i) : i < k ? load_some(row + i, k - i) : broadcast(0.0f)) * (127.0f / most);
#if defined(HAS_AMX)
            _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)value)));
#elif defined(HAS_AVX512)
            _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(_mm512_cvtps_epi32((__m512)value), _mm512_set1_epi32(128))));
#else
            const __m256i integers = _mm256_cvtps_epi32((__m256)value);
            const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
            _mm_storel_epi64((__m128i *)(q + i), _mm_packus_epi16(_mm_add_epi16(half, _mm_set1_epi16(128)), half));
#endif
        }
        out.scale[r] = most / 127.0f;
    }
}

static void round_to_bf16(const float *x, long ldx, long rows, long k, struct rounded out)
{
    const long padded_k = round_up(k, TILE_BYTES / 2);
    for (long r = 0; r < rows; r++) {
        for (long i = 0; i < padded_k; i += LANES)
            store_to(out.rows, r * padded_k + i, i < k ? load_some(x + r * ldx + i, k - i) : broadcast(0.0f), 1);
        out.scale[r] = 1.0f;
    }
}

static void round_rows(const struct linear *w, const float *x, long ldx, long rows, struct rounded out)
{
    if (w->kind == BF16)
        round_to_bf16(x, ldx, rows, w->inputs, out);
    else
        round_to_int8(x, ldx, rows, w->inputs, out);
}
#endif

#ifdef HAS_AMX
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
} __attribute__((packed));

static const struct tile_config eight_whole_tiles = {
    .palette = 1,
    .bytes_of_row = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES},
    .rows = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE},
};

/* A block of 32 rows and 32 outputs whose sums are there. */
struct block {
    const int32_t *sums; /* [32, 32], integers or, of bf16, fp32 */
    const float *row_scale;
    vec scale[2], bias[2];
    float *y;
    long ldy, rows, outputs; /* not more than 32 */
};

INLINE void finish_block(const struct block *block, long first, long end, long relu, const int is_half)
{
    if (end > block->rows)
        end = block->rows;
    for (long i = first; i < end; i++)
        for (long j = 0; j < 2; j++) {
            const __m512i bits = _mm512_load_si512(block->sums + i * 32 + j * LANES);
            const vec sums = is_half ? (vec)_mm512_castsi512_ps(bits) : (vec)_mm512_cvtepi32_ps(bits);
            const vec y = finish(sums, block->scale[j] * block->row_scale[i], block->bias[j], relu);
            if (block->outputs == 32)
                store(block->y + i * block->ldy + j * LANES, y);
            else
                store_some(block->y + i * block->ldy + j * LANES, y, block->outputs - j * LANES);
        }
}

#ifdef HAS_AMX_BF16
#define MULTIPLY_TILES(sums, left, right)      \
    do {                                       \
        if (is_half)                           \
            _tile_dpbf16ps(sums, left, right); \
        else                                   \
            _tile_dpbssd(sums, left, right);   \
    } while (0)
#else
#define MULTIPLY_TILES(sums, left, right) _tile_dpbssd(sums, left, right)
#endif

/* Sums of 16 rows, or 32 if there are two tiles of them, for 32 outputs. Meanwhile the block before is finished: matrix units work beside the others. */
INLINE void tile_sums(const int8_t *rows, const int8_t *packed, long bytes, const int two, int32_t *sums, const struct block *before, long relu,
                      const int is_half)
{
    const int8_t *rows2 = rows + TILE * bytes, *packed2 = packed + TILE * bytes;
    const long share = (32 * TILE_BYTES + bytes - 1) / bytes;
    long done = 0;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < bytes; k += TILE_BYTES, done += share) {
        _tile_loadd(6, packed + k * TILE, TILE_BYTES);
        _tile_loadd(7, packed2 + k * TILE, TILE_BYTES);
        _tile_loadd(4, rows + k, bytes);
        MULTIPLY_TILES(0, 4, 6);
        MULTIPLY_TILES(1, 4, 7);
        if (two) {
            _tile_loadd(5, rows2 + k, bytes);
            MULTIPLY_TILES(2, 5, 6);
            MULTIPLY_TILES(3, 5, 7);
        }
        finish_block(before, done, done + share, relu, is_half);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + TILE, 128);
    if (two) {
        _tile_stored(2, sums + TILE * 32, 128);
        _tile_stored(3, sums + TILE * 32 + TILE, 128);
    }
}

INLINE void multiply_tiles(const struct linear *w, struct rounded x, long rows, long relu, float *y, long ldy, const int is_half)
{
    const long bytes = bytes_of_row(w);
    int32_t sums[32 * 32] __attribute__((aligned(64))); /* of the block before, until that is finished, and then of the next */
    struct block block = {.rows = 0};
    _tile_loadconfig(&eight_whole_tiles);
    __asm__ volatile("" ::: "memory"); /* what tiles load has to be stored: compilers may not know that they load */
    for (long n = 0; n < w->outputs; n += 32) {
        const int8_t *columns = (const int8_t *)w->weight + n * bytes;
        const long outputs = w->outputs - n < 32 ? w->outputs - n : 32;
        for (long r = 0; r < rows; r += 32) {
            if (rows - r > TILE)
                tile_sums(x.rows + r * bytes, columns, bytes, 1, sums, &block, relu, is_half);
            else
                tile_sums(x.rows + r * bytes, columns, bytes, 0, sums, &block, relu, is_half);
            block = (struct block){sums, x.scale + r, {{0}}, {{0}}, y + r * ldy + n, ldy, rows - r < 32 ? rows - r : 32, outputs};
            for (long j = 0; j < 2; j++) {
                block.scale[j] = is_half ? broadcast(1.0f) : load_some(w->scale + n + j * LANES, outputs - j * LANES);
                if (w->bias != NULL)
                    block.bias[j] = load_some(w->bias + n + j * LANES, outputs - j * LANES);
            }
        }
    }
    finish_block(&block, 0, 32, relu, is_half);
    _tile_release();
}

static void multiply_rounded(const struct linear *w, struct rounded x, long rows, long relu, float *y, long ldy)
{
#ifdef HAS_AMX_BF16
    if (w->kind == BF16) {
        multiply_tiles(w, x, rows, relu, y, ldy, 1);
        return;
    }
#endif
    multiply_tiles(w, x, rows, relu, y, ldy, 0);
}
#elif defined(HAS_AVX2)
/* sums += products of four bytes, of each of LANES outputs: of a row, without sign, and weights; without VNNI of weights up to 63, so that 16 bits hold
 * the sum of two. */
INLINE ints add_products(ints sums, int32_t four, const int8_t *weight)
{
#if defined(HAS_VNNI)
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(four), _mm512_loadu_si512(weight));
#elif defined(HAS_AVX512)
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi32(four), _mm512_loadu_si512(weight));
    return (ints)_mm512_add_epi32((__m512i)sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi32(four), _mm256_loadu_si256((const __m256i *)weight));
    return (ints)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

INLINE vec to_floats(ints x)
{
#ifdef HAS_AVX512
    return (vec)_mm512_cvtepi32_ps((__m512i)x);
#else
    return (vec)_mm256_cvtepi32_ps((__m256i)x);
#endif
}

/* What becomes of the sums of a panel, and where they go. */
struct panel_end {
    vec scale[2], excess[2], bias[2];
    long relu, count;
};

INLINE void multiply_panel(const long rows, const int8_t *x, const float *row_scale, const int8_t *panel, long padded_k, const struct panel_end *end,
                           float *y, long ldy)
{
    ints sums[ROWS_OF_PANEL][2] = {{{0}}};
    for (long k = 0; k < padded_k; k += 4) {
        ask_for_weights(panel + k * PANEL);
        for (long i = 0; i < rows; i++) {
            int32_t four;
            memcpy(&four, x + i * padded_k + k, 4);
            for (long j = 0; j < 2; j++)
                sums[i][j] = add_products(sums[i][j], four, panel + k * PANEL + j * LANES * 4);
        }
    }
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < 2; j++) {
            const vec value = finish(to_floats(sums[i][j]) - end->excess[j], end->scale[j] * row_scale[i], end->bias[j], end->relu);
            store_some(y + i * ldy + j * LANES, value, end->count - j * LANES);
        }
}

static void multiply_rounded(const struct linear *w, struct rounded x, long rows, long relu, float *y, long ldy)
{
    const long padded_k = round_up(w->inputs, TILE_BYTES);
    for (long n = 0; n < w->outputs; n += PANEL) {
        const int8_t *panel = (const int8_t *)w->weight + n * padded_k;
        struct panel_end end = {.bias = {{0}}, .relu = relu, .count = w->outputs - n};
        for (long j = 0; j < 2; j++) {
            end.scale[j] = load_some(w->scale + n + j * LANES, end.count - j * LANES);
            end.excess[j] = load_some(w->excess + n + j * LANES, end.count - j * LANES);
            if (w->bias != NULL)
                end.bias[j] = load_some(w->bias + n + j * LANES, end.count - j * LANES);
        }
        for (long r = 0; r < rows; r += ROWS_OF_PANEL)
            FOR_NEXT_ROWS(rows - r, multiply_panel(together, x.rows + r * padded_k, x.scale + r, panel, padded_k, &end, y + r * ldy + n, ldy))
    }
}
#endif

INLINE long num_threads(void)
{
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

/* The outputs first .. first + count - 1; first is a multiple of 32. */
static struct linear part_of(const struct linear *w, long first, long count)
{
    struct linear part = *w;
    part.outputs = count;
    part.weight = (const char *)w->weight + first * (w->kind == FP32 ? (long)sizeof(float) * w->inputs : bytes_of_row(w));
    part.bias = w->bias == NULL ? NULL : w->bias + first;
    if (w->kind == INT8) {
        part.scale = w->scale + first;
        part.excess = w->excess + first;
    }
    return part;
}

/* The product, of rows that are rounded already where the weights are. */
static void multiply_part(const struct linear *w, const float *x, long ldx, struct rounded rounded, long rows, long relu, float *y, long ldy)
{
#ifdef HAS_AVX2
    if (w->kind != FP32) {
        multiply_rounded(w, rounded, rows, relu, y, ldy);
        return;
    }
#endif
    (void)rounded;
    multiply_fp32(w, x, ldx, rows, relu, y, ldy);
}

/* y = x W^T + b, or the larger of that and 0 with relu. */
void multiply(const struct linear *w, const float *x, long ldx, long rows, long relu, struct rounded room, float *y, long ldy)
{
#ifdef HAS_AVX2
    if (w->kind != FP32)
        round_rows(w, x, ldx, rows, room);
#endif
    /* Threads share the outputs, 32 at least; the results are the same for any number of them. */
    const long share = round_up((w->outputs + num_threads() - 1) / num_threads(), 32);
#pragma omp parallel for if (share < w->outputs)
    for (long first = 0; first < w->outputs; first += share) {
        const struct linear part = part_of(w, first, w->outputs - first < share ? w->outputs - first : share);
        multiply_part(&part, x, ldx, room, rows, relu, y + first, ldy);
    }
}

/* ---- attention ---- */

/* Arrange keys and values for `attend_sources`. Of each of B sentences and each head, the keys become columns, [C, P], and the values rows, [P, C], for
 * P, the length rounded up to 16; what is not there is 0. The blocks of a sentence begin at D times the sum of the P before it. */
INLINE void arrange(const float *k, const float *v, long ld, const int32_t *length, long sentences, long heads, long channels, void *keys, void *values,
                    const int is_half)
{
    long at = 0;
    for (long s = 0; s < sentences; s++) {
        const long n = length[s], padded = round_up(n, 16);
        for (long h = 0; h < heads; h++, at += padded * channels)
            for (long i = 0; i < padded; i += LANES)
                for (long c = 0; c < channels; c += LANES) {
                    vec square[LANES];
                    for (long j = 0; j < LANES; j++) {
                        const long from = (i + j) * ld + h * channels + c;
                        square[j] = i + j < n ? load(k + from) : broadcast(0.0f);
                        store_to(values, at + (i + j) * channels + c, i + j < n ? load(v + from) : broadcast(0.0f), is_half);
                    }
                    transpose(square);
                    for (long j = 0; j < LANES; j++)
                        store_to(keys, at + (c + j) * padded + i, square[j], is_half);
                }
        k += n * ld;
        v += n * ld;
    }
}

static void arrange_keys(const float *k, const float *v, long ld, const int32_t *length, long sentences, long heads, long channels, void *keys,
                         void *values, long is_half)
{
    if (is_half)
        arrange(k, v, ld, length, sentences, heads, channels, keys, values, 1);
    else
        arrange(k, v, ld, length, sentences, heads, channels, keys, values, 0);
}

/* The products of 4 queries with the keys i .. i + width * LANES - 1, or of one in four parts of the channels: several sums at a time, since each has to
 * wait for what was added to it before. */
INLINE void multiply_keys(const long rows, const long width, const float *q, long ldq, const void *keys, long at, long padded, long channels,
                          vec *products, const int is_half)
{
    for (long j = 0; j < 4 * width; j++)
        products[j] = broadcast(0.0f);
    for (long c = 0; c < channels; c += 4 / rows)
        for (long j = 0; j < 4; j++)
            for (long w = 0; w < width; w++)
                products[w * 4 + j] += q[rows == 4 ? j * ldq + c : c + j] * load_from(keys, at + (rows == 4 ? c : c + j) * padded + w * LANES, is_half);
    if (rows == 1)
        for (long w = 0; w < width; w++)
            products[w * 4] = (products[w * 4] + products[w * 4 + 1]) + (products[w * 4 + 2] + products[w * 4 + 3]);
}

/* Attention of 1 or 4 queries of one sentence in one head to n keys; its blocks begin at `at`. */
INLINE void attend_block(const long rows, const float *q, long ldq, const void *keys, const void *values, long at, long n, long channels, float scale,
                         float *scores, float *out, long ldo, const int is_half)
{
    const long padded = round_up(n, 16);
    vec highest[4];
    float factor[4];
    for (long j = 0; j < rows; j++)
        highest[j] = broadcast(-INFINITY);
    for (long i = 0; i < n; i += 2 * LANES) {
        vec products[8];
        const long width = n - i > LANES ? 2 : 1;
        if (width == 2)
            multiply_keys(rows, 2, q, ldq, keys, at + i, padded, channels, products, is_half);
        else
            multiply_keys(rows, 1, q, ldq, keys, at + i, padded, channels, products, is_half);
        for (long w = 0; w < width; w++)
            for (long j = 0; j < rows; j++) {
                const vec score = choose(lane < (int32_t)(n - i - w * LANES), products[w * 4 + j] * scale, broadcast(-INFINITY));
                highest[j] = larger(highest[j], score);
                store(scores + j * padded + i + w * LANES, score);
            }
    }
    for (long j = 0; j < rows; j++) {
        const float top = largest_of(highest[j]);
        vec sum = {0};
        for (long i = 0; i < n; i += LANES) {
            const vec e = exp_of_negative(load(scores + j * padded + i) - top);
            store(scores + j * padded + i, e);
            sum += e;
        }
        factor[j] = 1.0f / sum_of(sum);
    }
    long c = 0;
    for (; c + 2 * LANES <= channels; c += 2 * LANES)
        multiply_some(rows, 2, scores, padded, 1, values, at + c, channels, n, factor, out + c, ldo, is_half);
    for (; c < channels; c += LANES)
        multiply_some(rows, 1, scores, padded, 1, values, at + c, channels, n, factor, out + c, ldo, is_half);
}

INLINE void attend_rows(const float *q, long ldq, const void *keys, const void *values, const int32_t *start, const int32_t *count, long rows,
                        long heads, long channels, float *scores, float *out, const int is_half)
{
    const long d = heads * channels;
    const float scale = 1.0f / sqrtf((float)channels);
    for (long r = 0, together; r < rows; r += together) {
        together = r + 4 <= rows && start[r + 1] == start[r] && start[r + 2] == start[r] && start[r + 3] == start[r] ? 4 : 1;
        const long n = count[r];
        for (long h = 0; h < heads; h++) {
            const long at = start[r] * d + h * round_up(n, 16) * channels;
            const float *query = q + r * ldq + h * channels;
            float *result = out + r * d + h * channels;
            if (together == 4)
                attend_block(4, query, ldq, keys, values, at, n, channels, scale, scores, result, d, is_half);
            else
                attend_block(1, query, ldq, keys, values, at, n, channels, scale, scores, result, d, is_half);
        }
    }
}

/* Attention of rows to the positions of a sentence each, arranged by `arrange_keys`: row r of q attends to count[r] positions of the blocks that begin
 * at start[r] * D. scores has room for 4 times the longest sentence rounded up to 16. */
static void attend_sources(const float *q, long ldq, const void *keys, const void *values, const int32_t *start, const int32_t *count, long rows,
                           long heads, long channels, float *scores, float *out, long is_half)
{
    if (is_half)
        attend_rows(q, ldq, keys, values, start, count, rows, heads, channels, scores, out, 1);
    else
        attend_rows(q, ldq, keys, values, start, count, rows, heads, channels, scores, out, 0);
}

/* The values of one row, times its weights of every step and head, for `width` registers of channels from c on. */
INLINE void add_values(const long width, const void *const *kv, const int32_t *line, long steps, long d, long c, long channels, const float *weights,
                       long ldw, const float *factor, float *out, const int is_half)
{
    vec sums[4] = {{0}};
    long head[4];
    for (long j = 0; j < width; j++)
        head[j] = (c + j * LANES) / channels;
    for (long t = 0; t < steps; t++)
        for (long j = 0; j < width; j++)
            sums[j] += weights[t * ldw + head[j]] * load_from(kv[t], line[t] * 2 * d + d + c + j * LANES, is_half);
    for (long j = 0; j < width; j++)
        store(out + c + j * LANES, sums[j] * factor[head[j]]);
}

#define MAX_HEADS 128

INLINE void attend_past(const float *q, long ldq, const void *const *kv, const int32_t *ancestor, long ld, long steps, long rows, long heads,
                        long channels, float *scores, float *out, const int is_half)
{
    const float scale = 1.0f / sqrtf((float)channels);
    const long d = heads * channels, all = steps * heads;
    for (long r = 0; r < rows; r++) {
        const int32_t *line = ancestor + r * ld;
        const float *query = q + r * ldq;
        vec products[LANES];
        long filled = 0, done = 0;
        for (long t = 0; t < steps; t++)
            for (long h = 0; h < heads; h++) {
                vec sum = {0};
                for (long c = h * channels; c < (h + 1) * channels; c += LANES)
                    sum += load(query + c) * load_from(kv[t], line[t] * 2 * d + c, is_half);
                products[filled++] = sum;
                if (filled == LANES || (t == steps - 1 && h == heads - 1)) {
                    store(scores + done, sums_of(products) * scale);
                    done += filled;
                    filled = 0;
                }
            }
        float highest[MAX_HEADS], sum[MAX_HEADS];
        for (long h = 0; h < heads; h++) {
            highest[h] = scores[h];
            sum[h] = 0.0f;
        }
        for (long t = 1; t < steps; t++)
            for (long h = 0; h < heads; h++)
                highest[h] = highest[h] < scores[t * heads + h] ? scores[t * heads + h] : highest[h];
        for (long t = 0; t < steps; t++)
            for (long h = 0; h < heads; h++)
                scores[t * heads + h] -= highest[h];
        for (long i = 0; i < all; i += LANES)
            store(scores + i, exp_of_negative(load(scores + i)));
        for (long t = 0; t < steps; t++)
            for (long h = 0; h < heads; h++)
                sum[h] += scores[t * heads + h];
        for (long h = 0; h < heads; h++)
            sum[h] = 1.0f / sum[h];
        long c = 0;
        for (; c + 4 * LANES <= d; c += 4 * LANES)
            add_values(4, kv, line, steps, d, c, channels, scores, heads, sum, out + r * d, is_half);
        for (; c < d; c += LANES)
            add_values(1, kv, line, steps, d, c, channels, scores, heads, sum, out + r * d, is_half);
    }
}

/* Attention of each row to its ancestors in a search. kv[t] holds keys and values of all rows of step t, side by side, and ancestor[r][t] is the row of
 * step t that row r descends from; at the last step that is the row itself. scores has room for H times the steps rounded up to 16. */
static void attend_ancestors(const float *q, long ldq, const void *const *kv, const int32_t *ancestor, long ld, long steps, long rows, long heads,
                             long channels, float *scores, float *out, long is_half)
{
    if (is_half)
        attend_past(q, ldq, kv, ancestor, ld, steps, rows, heads, channels, scores, out, 1);
    else
        attend_past(q, ldq, kv, ancestor, ld, steps, rows, heads, channels, scores, out, 0);
}

/* ---- LayerNorm and activations ---- */

struct norm {
    const float *weight, *bias;
};

/* x += change, unless that is NULL; normed = LayerNorm(x), which may be x itself. */
static void add_norm(float *x, const float *change, struct norm norm, float epsilon, long rows, long d, float *normed)
{
    for (long r = 0; r < rows; r++, x += d, normed += d) {
        vec sum = {0}, squares = {0};
        for (long i = 0; i < d; i += LANES) {
            vec value = load(x + i);
            if (change != NULL)
                value += load(change + r * d + i);
            store(x + i, value);
            sum += value;
        }
        const float mean = sum_of(sum) / (float)d;
        for (long i = 0; i < d; i += LANES)
            squares += (load(x + i) - mean) * (load(x + i) - mean);
        const float factor = 1.0f / sqrtf(sum_of(squares) / (float)d + epsilon);
        for (long i = 0; i < d; i += LANES)
            store(normed + i, (load(x + i) - mean) * factor * load(norm.weight + i) + load(norm.bias + i));
    }
}

enum { RELU = 0, GELU = 1, SWIGLU = 2 };

/* In place, [R, F] from [R, F], or from [R, 2 F] for SwiGLU, whose rows keep their distance. F is a multiple of 16. */
static void activate(float *x, long ld, long rows, long width, long activation)
{
    for (long r = 0; r < rows; r++, x += ld)
        for (long i = 0; i < width; i += LANES) {
            const vec value = load(x + i), magnitude = (vec)((ints)value & 0x7fffffff);
            if (activation == GELU) { /* x / 2 * (1 + erf(x / sqrt 2)), erf by Abramowitz and Stegun 7.1.26, to 1.5e-7 */
                const vec z = magnitude * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
                const vec series = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
                const vec erf_of_z = 1.0f - series * exp_of_negative(-z * z);
                store(x + i, value * 0.5f * (1.0f + choose(value < broadcast(0.0f), -erf_of_z, erf_of_z)));
            } else { /* value / (1 + e^-value), with an exponential that cannot overflow */
                const vec e = exp_of_negative(-magnitude);
                store(x + i, value * choose(value < broadcast(0.0f), e, broadcast(1.0f)) / (1.0f + e) * load(x + width + i));
            }
        }
}

/* ---- the best pieces ---- */

#define PIECES_TOGETHER 512 /* of how many pieces the logits are computed before they are looked at, so that they are still in the cache */
#define BLOCK 64            /* of how many the largest is compared first */

/* Of every row the best pieces so far. */
struct best {
    const int64_t *forbidden; /* ascending: they count for the probabilities of the others and are never among the best */
    long num_forbidden, count;
    const int64_t *forced; /* [R]: the one piece that a row may take, or -1 for any; NULL: any for all */
    float *highest; /* largest logit, -inf at first */
    double *sum; /* of the exponentials relative to it, 0 at first */
    float *value; /* [R, count], -inf at first: their logits, and in the end log-probabilities, best first; equal ones rank by their number */
    int64_t *piece; /* [R, count] */
};

/* Take in the logits of pieces first .. first + n - 1, and overwrite those of forbidden ones. Behind each row there is room for BLOCK more. */
static void add_logits(float *logits, long ld, long rows, long first, long n, const struct best *best)
{
    float tops[PIECES_TOGETHER / BLOCK];
    const long padded = round_up(n, BLOCK), count = best->count;
    for (long r = 0; r < rows; r++) {
        float *x = logits + r * ld, *value = best->value + r * count;
        int64_t *piece = best->piece + r * count;
        vec all = broadcast(best->highest[r]), sum = {0};
        for (long i = n; i < padded; i++)
            x[i] = -INFINITY;
        for (long start = 0; start < padded; start += BLOCK) {
            vec block = load(x + start);
            for (long i = LANES; i < BLOCK; i += LANES)
                block = larger(block, load(x + start + i));
            all = larger(all, block);
            tops[start / BLOCK] = largest_of(block);
        }
        const float before = best->highest[r], top = largest_of(all);
        for (long i = 0; i < padded; i += LANES)
            sum += exp_of_negative(load(x + i) - top); /* what is far below counts for 1e-38 */
        best->highest[r] = top;
        /* not where there was none yet; NaN among the first logits is kept */
        best->sum[r] = sum_of(sum) + (best->sum[r] == 0.0 ? 0.0 : best->sum[r] * exp((double)before - top));
        for (long i = 0; i < best->num_forbidden; i++)
            if (best->forbidden[i] >= first && best->forbidden[i] < first + n)
                x[best->forbidden[i] - first] = -INFINITY;
        if (best->forced != NULL && best->forced[r] >= 0) {
            const long i = best->forced[r] - first;
            if (i >= 0 && i < n) {
                value[0] = x[i];
                piece[0] = best->forced[r];
            }
            continue;
        }
        for (long start = 0; start < padded; start += BLOCK) {
            if (!(tops[start / BLOCK] > value[count - 1]))
                continue;
            for (long i = start; i < start + BLOCK; i++) {
                if (!(x[i] > value[count - 1]))
                    continue;
                long place = count - 1;
                for (; place > 0 && x[i] > value[place - 1]; place--) {
                    value[place] = value[place - 1];
                    piece[place] = piece[place - 1];
                }
                value[place] = x[i];
                piece[place] = first + i;
            }
        }
    }
}

/* ---- the model ---- */

/* What encoder and decoder have in common. */
struct model {
    long num_layers, heads, channels, activation;
    long is_half; /* whether keys and values are kept as bf16 */
    float epsilon;
    struct norm first_norm; /* with pre-norm: of the embeddings, for the first layer; NULL with post-norm */
    const void *embedding; /* [V, D], fp32, or int8 if there are scales */
    const float *embedding_scale; /* [V], or NULL */
};

/* Room for the numbers of R rows: [R, D] each; attention's scores, H times the steps and 4 times the longest source, both rounded up to 16;
 * [R, W] for the widest of 3 D, F (2 F with SwiGLU) and PIECES_TOGETHER + BLOCK. */
struct room {
    float *x, *y, *heads, *scores, *wide;
    struct rounded rounded;
};

/* x = embeddings * sqrt(D) + positions, of row r positions[r], or the first for all. */
static void embed(const struct model *model, const int64_t *tokens, const float *positions, long ld, long rows, float *x)
{
    const long d = model->heads * model->channels;
    for (long r = 0; r < rows; r++) {
        float *row = x + r * d;
        if (model->embedding_scale) {
            const int8_t *rounded = (const int8_t *)model->embedding + tokens[r] * d;
            for (long i = 0; i < d; i++)
                row[i] = (float)rounded[i] * model->embedding_scale[tokens[r]];
        } else {
            memcpy(row, (const float *)model->embedding + tokens[r] * d, (size_t)d * sizeof *row);
        }
        for (long i = 0; i < d; i += LANES)
            store(row + i, load(row + i) * sqrtf((float)d) + load(positions + r * ld + i));
    }
}

/* Set y, what the first layer reads, from x, the embeddings. From here on y is the norm of x, and with post-norm x itself. */
static struct room begin(const struct model *model, long rows, struct room room)
{
    if (model->first_norm.weight == NULL)
        room.y = room.x;
    else
        add_norm(room.x, NULL, model->first_norm, model->epsilon, rows, model->heads * model->channels, room.y);
    return room;
}

/* The feed-forward network, with the sum and the norm that follow: x and y, its input, become those of the next layer. */
static void feed_forward(const struct model *model, const struct linear *in, const struct linear *out, struct norm norm, long rows, struct room room)
{
    const long d = model->heads * model->channels, width = in->outputs;
    multiply(in, room.y, d, rows, model->activation == RELU, room.rounded, room.wide, width);
    if (model->activation != RELU)
        activate(room.wide, width, rows, out->inputs, model->activation);
    multiply(out, room.wide, width, rows, 0, room.rounded, room.heads, d);
    add_norm(room.x, room.heads, norm, model->epsilon, rows, d, room.y);
}

/* ---- the encoder ---- */

/* Sentences are encoded together until they have so many positions, or so many places when they are arranged: enough for fast products. */
#define ROWS_OF_GROUP 128
#define PLACES_OF_GROUP 512

struct encoder_layer {
    struct linear self_in, self_out, hidden_in, hidden_out;
    struct norm norms[2]; /* after self-attention and feed-forward; with pre-norm these are the ones before what comes next */
};

struct encoder {
    struct model model;
    const struct encoder_layer *layers;
    const struct linear *sources; /* what makes keys and values for each layer of the decoder */
    long num_sources;
};

/* Encode sentences, and arrange keys and values for each layer of the decoder.
 * tokens: of all sentences, one after the other. positions: [longest, D], the encodings of positions. keys, values: [layers of the decoder].
 * room, start and count are for ROWS_OF_GROUP rows and the longest sentence, own_keys and own_values for PLACES_OF_GROUP places and the longest
 * sentence rounded up to 16. */
void encode(const struct encoder *encoder, const int64_t *tokens, const float *positions, const int32_t *length, long sentences, void *const *keys,
            void *const *values, struct room room, float *own_keys, float *own_values, int32_t *start, int32_t *count)
{
    const struct model *model = &encoder->model;
    const long d = model->heads * model->channels;
    long at = 0;
    for (long first = 0, end; first < sentences; first = end) {
        long rows = 0, padded = 0;
        struct room now = room;
        for (end = first; end < sentences && rows < ROWS_OF_GROUP && padded < PLACES_OF_GROUP; end++) {
            embed(model, tokens + rows, positions, d, length[end], now.x + rows * d);
            for (long i = 0; i < length[end]; i++) {
                start[rows + i] = (int32_t)padded;
                count[rows + i] = length[end];
            }
            rows += length[end];
            padded += round_up(length[end], 16);
        }
        tokens += rows;
        now = begin(model, rows, now);
        for (long l = 0; l < model->num_layers; l++) {
            const struct encoder_layer *layer = &encoder->layers[l];
            multiply(&layer->self_in, now.y, d, rows, 0, now.rounded, now.wide, 3 * d);
            arrange_keys(now.wide + d, now.wide + 2 * d, 3 * d, length + first, end - first, model->heads, model->channels, own_keys, own_values, 0);
            attend_sources(now.wide, 3 * d, own_keys, own_values, start, count, rows, model->heads, model->channels, now.scores, now.heads, 0);
            multiply(&layer->self_out, now.heads, d, rows, 0, now.rounded, now.wide, d);
            add_norm(now.x, now.wide, layer->norms[0], model->epsilon, rows, d, now.y);
            feed_forward(model, &layer->hidden_in, &layer->hidden_out, layer->norms[1], rows, now);
        }
        for (long l = 0; l < encoder->num_sources; l++) {
            multiply(&encoder->sources[l], now.y, d, rows, 0, now.rounded, now.wide, 2 * d);
            arrange_keys(now.wide, now.wide + d, 2 * d, length + first, end - first, model->heads, model->channels,
                         (char *)keys[l] + at * d * size_of(model->is_half), (char *)values[l] + at * d * size_of(model->is_half), model->is_half);
        }
        at += padded;
    }
}

/* ---- a step of the decoder ---- */

struct decoder_layer {
    struct linear self_in, self_out, cross_query, cross_out, hidden_in, hidden_out;
    struct norm norms[3]; /* after self-attention, attention to the source, and feed-forward, see `encoder_layer` */
};

struct decoder {
    struct model model;
    const struct decoder_layer *layers;
    struct linear output;
    long vocab_size;
};

/* A batch of sentences under search, at one step. */
struct step {
    long num_rows, num_steps; /* this one included */
    const int64_t *tokens; /* [R] */
    const float *position; /* [D], the encoding of this position */
    void *const *kv; /* of each step: all layers' keys and values, [L, R of the step, 2 D] */
    const int64_t *rows_of_step;
    const int32_t *ancestor; /* [R, ld] */
    long ancestor_ld;
    const void *const *keys, *const *values; /* of each layer, from `encode` */
    const int32_t *start, *count; /* [R]: where its sentence begins there, and its length */
    struct best best;
    struct room room;
    const void **pointers; /* room for one for each step */
};

void decode_step(const struct decoder *decoder, const struct step *step)
{
    const struct model *model = &decoder->model;
    const long rows = step->num_rows, d = model->heads * model->channels, now = step->num_steps - 1;
    struct room room = step->room;
    embed(model, step->tokens, step->position, 0, rows, room.x);
    room = begin(model, rows, room);
    for (long l = 0; l < model->num_layers; l++) {
        const struct decoder_layer *layer = &decoder->layers[l];
        for (long t = 0; t <= now; t++)
            step->pointers[t] = (const char *)step->kv[t] + l * step->rows_of_step[t] * 2 * d * size_of(model->is_half);
        multiply(&layer->self_in, room.y, d, rows, 0, room.rounded, room.wide, 3 * d);
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < 2 * d; i += LANES)
                store_to((void *)step->pointers[now], r * 2 * d + i, load(room.wide + r * 3 * d + d + i), model->is_half);
        attend_ancestors(room.wide, 3 * d, step->pointers, step->ancestor, step->ancestor_ld, now + 1, rows, model->heads, model->channels, room.scores,
                         room.heads, model->is_half);
        multiply(&layer->self_out, room.heads, d, rows, 0, room.rounded, room.wide, d);
        add_norm(room.x, room.wide, layer->norms[0], model->epsilon, rows, d, room.y);

        multiply(&layer->cross_query, room.y, d, rows, 0, room.rounded, room.wide, d);
        attend_sources(room.wide, d, step->keys[l], step->values[l], step->start, step->count, rows, model->heads, model->channels, room.scores,
                       room.heads, model->is_half);
        multiply(&layer->cross_out, room.heads, d, rows, 0, room.rounded, room.wide, d);
        add_norm(room.x, room.wide, layer->norms[1], model->epsilon, rows, d, room.y);
        feed_forward(model, &layer->hidden_in, &layer->hidden_out, layer->norms[2], rows, room);
    }
#ifdef HAS_AVX2
    if (decoder->output.kind != FP32)
        round_rows(&decoder->output, room.y, d, rows, room.rounded);
#endif
    for (long first = 0; first < decoder->vocab_size; first += PIECES_TOGETHER) {
        const long ld = PIECES_TOGETHER + BLOCK, left = decoder->vocab_size - first;
        const struct linear part = part_of(&decoder->output, first, left < PIECES_TOGETHER ? left : PIECES_TOGETHER);
        multiply_part(&part, room.y, d, room.rounded, rows, 0, room.wide, ld);
        add_logits(room.wide, ld, rows, first, part.outputs, &step->best);
    }
    for (long r = 0; r < rows; r++) {
        const float log_sum = (float)(log(step->best.sum[r]) + step->best.highest[r]);
        for (long i = 0; i < step->best.count; i++)
            step->best.value[r * step->best.count + i] -= log_sum;
    }
}

/* For `structs.py`, which repeats them, to compare. */
long struct_size(long number)
{
    static const long sizes[] = {
        sizeof(struct linear),  sizeof(struct rounded),       sizeof(struct norm),    sizeof(struct model), sizeof(struct room), sizeof(struct encoder_layer),
        sizeof(struct encoder), sizeof(struct decoder_layer), sizeof(struct decoder), sizeof(struct best),  sizeof(struct step),
    };
    return sizes[number];
}
