/* `x >> places`, also where x is negative, which C leaves open */
static inline int32_t down(int32_t x, int32_t places)
{
    return x < 0 ? ~(~x >> places) : x >> places;
}

/* offset + the high word of a * b */
static inline int32_t high_sum(int32_t offset, int32_t a, int32_t b)
{
#if defined(QJAX_ASSEMBLY)
    int32_t found;
    __asm__("smmla %0, %1, %2, %3" : "=r"(found) : "r"(a), "r"(b), "r"(offset));
    return found;
#else
    const int64_t product = (int64_t)a * b;
    return offset + (product < 0 ? (int32_t)~(~product >> 32) : (int32_t)(product >> 32));
#endif
}

static inline uint8_t clamped(int32_t x, int32_t least, int32_t most)
{
    return (uint8_t)(x < least ? least : x > most ? most : x);
}

QJAX_KERNEL void qjax_codes(
    const int32_t *sums, int32_t n, const int32_t *factor, const int32_t *offset, int32_t up, int32_t shift, int32_t least,
    int32_t most, void *out)
{
    uint8_t *codes = out;
#if defined(QJAX_HELIUM)
    for (; n >= 4; n -= 4, sums += 4, factor += 4, offset += 4, codes += 4) {
        int32x4_t x = vmulhq_s32(vshlq_r_s32(vldrwq_s32(sums), up), vldrwq_s32(factor));
        x = vshlq_r_s32(vaddq_s32(x, vldrwq_s32(offset)), -shift);
        x = vminq_s32(vmaxq_s32(x, vdupq_n_s32(least)), vdupq_n_s32(most));
        vstrbq_u32(codes, vreinterpretq_u32_s32(x));
    }
#elif defined(QJAX_ASSEMBLY)
    if (least == -128 && most == 127) {
        /* in registers, not on the stack */
        __asm__("" : "+r"(up), "+r"(shift));
        for (; n > 0; n--) {
            int32_t x = down(high_sum(*offset++, *sums++ * ((int32_t)1 << up), *factor++), shift);
            __asm__("ssat %0, #8, %0" : "+r"(x));
            *codes++ = (uint8_t)x;
        }
    }
#endif
    for (; n > 0; n--) {
        const int32_t x = high_sum(*offset++, *sums++ * ((int32_t)1 << up), *factor++);
        *codes++ = clamped(down(x, shift), least, most);
    }
}

QJAX_KERNEL void qjax_sides(
    const int32_t *sums, int32_t n, const int32_t *factor, const int32_t *offset, const int32_t *kink, const int32_t *below,
    int32_t up, int32_t shift, int32_t least, int32_t most, void *out)
{
    uint8_t *codes = out;
#if defined(QJAX_HELIUM)
    for (; n >= 4; n -= 4, sums += 4, factor += 4, offset += 4, kink += 4, below += 4, codes += 4) {
        const int32x4_t sum = vldrwq_s32(sums);
        const mve_pred16_t under = vcmpltq_s32(sum, vldrwq_s32(kink));
        const int32x4_t own = vpselq_s32(vldrwq_s32(below), vldrwq_s32(offset), under);
        int32x4_t x = vmulhq_s32(vshlq_r_s32(sum, up), vldrwq_s32(factor));
        x = vshlq_r_s32(vaddq_s32(x, own), -shift);
        x = vminq_s32(vmaxq_s32(x, vdupq_n_s32(least)), vdupq_n_s32(most));
        vstrbq_u32(codes, vreinterpretq_u32_s32(x));
    }
#endif
    for (; n > 0; n--, offset++, below++) {
        const int32_t own = *sums < *kink++ ? *below : *offset;
        const int32_t x = high_sum(own, *sums++ * ((int32_t)1 << up), *factor++);
        *codes++ = clamped(down(x, shift), least, most);
    }
}
