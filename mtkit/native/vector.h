/* Numbers by the register, for the processor that the code is compiled for: vectors of fp32 as a compiler of the GNU kind knows them, so that most code
 * is the same for all processors. */

#ifndef MTKIT_VECTOR_H
#define MTKIT_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define HAS_AVX2 1
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_AVX512 1
#endif
#if defined(HAS_AVX512) && defined(__AVX512VNNI__)
#define HAS_VNNI 1
#endif
#if defined(HAS_VNNI) && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_AMX 1
#if defined(__AMX_BF16__)
#define HAS_AMX_BF16 1
#endif
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#ifdef HAS_AVX512
#define LANES 16
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec load(const float *x) { return *(const vec *)x; }
INLINE void store(float *x, vec value) { *(vec *)x = value; }
INLINE vec broadcast(float x) { return x - (vec){0}; }
INLINE vec choose(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }
INLINE vec larger(vec a, vec b) { return choose(a < b, b, a); } /* a if that is NaN */
INLINE long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Numbers in memory, as fp32 or as bf16, the upper half of it. */
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE long size_of(int is_half) { return is_half ? 2 : 4; }

INLINE vec load_from(const void *x, long i, int is_half)
{
    if (!is_half)
        return load((const float *)x + i);
    const uint16_t *half = (const uint16_t *)x + i;
#if defined(HAS_AVX512)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)half)), 16);
#elif defined(HAS_AVX2)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)half)), 16);
#else
    return (vec)(__builtin_convertvector(*(const halves *)half, bits) << 16);
#endif
}

/* To the nearest, or to the even one. NaN stays NaN. */
INLINE halves to_half(vec x)
{
#if defined(HAS_AVX512) && defined(__AVX512BF16__)
    return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    const bits b = (bits)x, rounded = b + 0x7fff + ((b >> 16) & 1), is_nan = (bits)(x != x);
    const bits all = ((rounded & ~is_nan) | ((b | 0x400000) & is_nan)) >> 16;
#if defined(HAS_AVX512)
    return (halves)_mm512_cvtepi32_epi16((__m512i)all);
#else
    return __builtin_convertvector(all, halves);
#endif
#endif
}

/* LANES bytes without sign. */
INLINE ints load_bytes(const uint8_t *x)
{
#if defined(HAS_AVX512)
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
#elif defined(HAS_AVX2)
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x));
#else
    ints all;
    for (int i = 0; i < LANES; i++)
        all[i] = x[i];
    return all;
#endif
}

INLINE void store_to(void *x, long i, vec value, int is_half)
{
    if (!is_half)
        store((float *)x + i, value);
    else
        *(halves *)((uint16_t *)x + i) = to_half(value);
}

#if defined(HAS_AVX512)
INLINE float sum_of(vec x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float largest_of(vec x) { return _mm512_reduce_max_ps((__m512)x); }
#else
INLINE float sum_of(vec x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }
INLINE float larger_of(float a, float b) { return a < b ? b : a; }
INLINE float largest_of(vec x)
{
    return larger_of(larger_of(larger_of(x[0], x[4]), larger_of(x[1], x[5])), larger_of(larger_of(x[2], x[6]), larger_of(x[3], x[7])));
}
#endif

/* The sums of LANES registers. */
INLINE vec sums_of(const vec *x)
{
#if defined(HAS_AVX512)
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = (__m512)x[i];
    for (int i = 0; i < 8; i++)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d c = _mm512_castps_pd(b[2 * i]), d = _mm512_castps_pd(b[2 * i + 1]);
        a[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    }
    for (int i = 0; i < 2; i++)
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88), _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    return (vec)_mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
#elif defined(HAS_AVX2)
    __m256 a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_hadd_ps((__m256)x[2 * i], (__m256)x[2 * i + 1]);
    for (int i = 0; i < 2; i++)
        b[i] = _mm256_hadd_ps(a[2 * i], a[2 * i + 1]);
    return (vec)_mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
#else
    vec sums;
    for (int i = 0; i < LANES; i++)
        sums[i] = sum_of(x[i]);
    return sums;
#endif
}

/* 0, 1, 2, ... */
static const ints lane = {0, 1, 2, 3, 4, 5, 6, 7
#if LANES == 16
                          , 8, 9, 10, 11, 12, 13, 14, 15
#endif
};

/* Numbers of a and, from LANES on, of b. */
INLINE vec pick(vec a, vec b, const ints from)
{
#ifdef __clang__
    vec picked;
    for (int i = 0; i < LANES; i++)
        picked[i] = from[i] < LANES ? a[from[i]] : b[from[i] - LANES];
    return picked;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

/* Of each two rows so far apart, exchange the squares of that size beside the diagonal. */
INLINE void exchange_squares(vec *rows, const int size)
{
    const ints is_right = (lane & size) != 0;
    for (int i = 0; i < LANES; i++)
        if ((i & size) == 0) {
            const vec a = rows[i], b = rows[i + size];
            rows[i] = pick(a, b, lane + (is_right & (LANES - size)));
            rows[i + size] = pick(a, b, lane + (is_right & LANES) + (~is_right & size));
        }
}

/* Make rows of the columns of LANES registers. */
INLINE void transpose(vec *rows)
{
    exchange_squares(rows, 1);
    exchange_squares(rows, 2);
    exchange_squares(rows, 4);
#if LANES == 16
    exchange_squares(rows, 8);
#endif
}

/* e^x for x <= 0, to 2 units in the last place where it matters: 2^n times 2^f for |f| <= 1/2, by the polynomial of degree 5 with the least error. */
INLINE vec exp_of_negative(vec x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which then stands in the lowest bits */
    const vec t = larger(x, broadcast(-87.0f)) * 1.44269504f;
    const vec shifted = t + magic, f = t - (shifted - magic);
    vec p = f * 0.0013276466f + 0.009675541f;
    p = p * f + 0.055507135f;
    p = p * f + 0.2402212f;
    p = p * f + 0.69314694f;
    p = p * f + 1.0000001f;
    return p * (vec)(((bits)shifted << 23) + 0x3f800000u); /* a product, so that NaN stays NaN whatever its bits */
}

/* out [rows, columns] = a [rows, inner] b [inner, columns], each row times its factor unless that is NULL, for 1 or 4 rows and `width` (1 or 2) registers
 * of columns. Element (i, k) of a lies at i * lda + k * stride_a; row k of b begins at number `at` + k * ldb. */
INLINE void multiply_some(const long rows, const long width, const float *a, long lda, long stride_a, const void *b, long at, long ldb, long inner,
                          const float *factor, float *out, long ldo, const int is_half)
{
    vec sums[8] = {{0}};
    for (long k = 0; k < inner; k++)
        for (long w = 0; w < width; w++)
            for (long i = 0; i < rows; i++)
                sums[w * 4 + i] += a[i * lda + k * stride_a] * load_from(b, at + k * ldb + w * LANES, is_half);
    for (long i = 0; i < rows; i++)
        for (long w = 0; w < width; w++)
            store(out + i * ldo + w * LANES, sums[w * 4 + i] * (factor == NULL ? 1.0f : factor[i]));
}

#endif
