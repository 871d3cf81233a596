/* The rounding instructions of AArch64 on a stream of records: what real NEON makes of one accumulator.

   usage: neon RULE < records > results

   A record is three little-endian int32 (accumulator, a, b); a result is one int32. The rules in fixed point read
   a = M and b = s, for accumulator * M * 2^(s-31); the float rules read a = the bits of a float32 scale and
   b = the zero point. Four records pass through the vector unit at a time. Build without contraction
   (-ffp-contract=off): vmulq_f32 and vaddq_f32 must stay two instructions. */

#include <arm_neon.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int32x4_t (*Rule)(int32x4_t acc, int32x4_t a, int32x4_t b);

static int32x4_t zero(void) { return vdupq_n_s32(0); }
static int32x4_t left_part(int32x4_t s) { return vmaxq_s32(s, zero()); }
static int32x4_t right_part(int32x4_t s) { return vminq_s32(s, zero()); }

/* One instruction each. The left operand of SRSHL is the accumulator; M is not read. */
static int32x4_t sqrdmulh(int32x4_t acc, int32x4_t m, int32x4_t s) { return vqrdmulhq_s32(acc, m); }
static int32x4_t sqdmulh(int32x4_t acc, int32x4_t m, int32x4_t s) { return vqdmulhq_s32(acc, m); }
static int32x4_t srshl(int32x4_t acc, int32x4_t m, int32x4_t s) { return vrshlq_s32(acc, s); }

/* TFLite's MultiplyByQuantizedMultiplier4Rows and TVM's old lowering for arm_cpu: SSHL, SQRDMULH, SRSHL. */
static int32x4_t neon(int32x4_t acc, int32x4_t m, int32x4_t s) {
  return vrshlq_s32(vqrdmulhq_s32(vshlq_s32(acc, left_part(s)), m), right_part(s));
}

/* gemmlowp's RoundingDivideByPOT for NEON: negative values lose 1 first, so that their ties go away from zero. */
static int32x4_t double_round(int32x4_t acc, int32x4_t m, int32x4_t s) {
  int32x4_t high = vqrdmulhq_s32(vshlq_s32(acc, left_part(s)), m), right = right_part(s);
  int32x4_t fixup = vshrq_n_s32(vandq_s32(high, right), 31);
  return vrshlq_s32(vqaddq_s32(high, fixup), right);
}

/* ruy's kernels for ARM: a right shift of at least 1, so that SQDMULH may truncate. */
static int32x4_t ruy(int32x4_t acc, int32x4_t m, int32x4_t s) {
  int32x4_t right = vminq_s32(s, vdupq_n_s32(-1));
  return vrshlq_s32(vqdmulhq_s32(vshlq_s32(acc, vsubq_s32(s, right)), m), right);
}

/* XNNPACK's rndnu: the same with a left shift that saturates. */
static int32x4_t xnnpack_rndnu(int32x4_t acc, int32x4_t m, int32x4_t s) {
  int32x4_t right = vminq_s32(s, vdupq_n_s32(-1));
  return vrshlq_s32(vqdmulhq_s32(vqshlq_s32(acc, vsubq_s32(s, right)), m), right);
}

/* The whole 64-bit product, one SRSHL on 64 bits, and a narrowing that saturates. */
static int32x4_t single_round(int32x4_t acc, int32x4_t m, int32x4_t s) {
  int32x4_t total = vsubq_s32(s, vdupq_n_s32(31));
  int64x2_t low = vrshlq_s64(vmull_s32(vget_low_s32(acc), vget_low_s32(m)), vmovl_s32(vget_low_s32(total)));
  int64x2_t high = vrshlq_s64(vmull_s32(vget_high_s32(acc), vget_high_s32(m)), vmovl_s32(vget_high_s32(total)));
  return vcombine_s32(vqmovn_s64(low), vqmovn_s64(high));
}

/* The repair proposed for TVM: SQDMULH for s < 0, SQRDMULH otherwise. */
static int32x4_t proposed_fix(int32x4_t acc, int32x4_t m, int32x4_t s) {
  int32x4_t x = vshlq_s32(acc, left_part(s));
  int32x4_t truncated = vrshlq_s32(vqdmulhq_s32(x, m), right_part(s));
  return vbslq_s32(vcltq_s32(s, zero()), truncated, vqrdmulhq_s32(x, m));
}

/* SCVTF, FMUL, FCVTNS: the conversion rounds to nearest even and saturates. The zero point is not read. */
static int32x4_t float32(int32x4_t acc, int32x4_t e, int32x4_t zero_point) {
  return vcvtnq_s32_f32(vmulq_f32(vcvtq_f32_s32(acc), vreinterpretq_f32_s32(e)));
}

/* The zero point inside the rounding, as a second operation (FADD) ... */
static int32x4_t float32_zero_point_inside(int32x4_t acc, int32x4_t e, int32x4_t zero_point) {
  float32x4_t product = vmulq_f32(vcvtq_f32_s32(acc), vreinterpretq_f32_s32(e));
  return vcvtnq_s32_f32(vaddq_f32(product, vcvtq_f32_s32(zero_point)));
}

/* ... or fused into the product (FMLA). */
static int32x4_t float32_zero_point_fma(int32x4_t acc, int32x4_t e, int32x4_t zero_point) {
  return vcvtnq_s32_f32(vfmaq_f32(vcvtq_f32_s32(zero_point), vcvtq_f32_s32(acc), vreinterpretq_f32_s32(e)));
}

#define RULE(name) {#name, name}
static const struct {
  const char *name;
  Rule apply;
} RULES[] = {RULE(sqrdmulh),      RULE(sqdmulh),      RULE(srshl),        RULE(neon),
             RULE(double_round),  RULE(ruy),          RULE(single_round), RULE(xnnpack_rndnu),
             RULE(proposed_fix),  RULE(float32),      RULE(float32_zero_point_inside),
             RULE(float32_zero_point_fma)};

int main(int argc, char **argv) {
  Rule apply = NULL;
  for (size_t i = 0; argc == 2 && i < sizeof RULES / sizeof *RULES; i++)
    if (!strcmp(argv[1], RULES[i].name)) apply = RULES[i].apply;
  if (!apply) {
    fprintf(stderr, "usage: neon RULE, one of");
    for (size_t i = 0; i < sizeof RULES / sizeof *RULES; i++) fprintf(stderr, " %s", RULES[i].name);
    fprintf(stderr, "\n");
    return 2;
  }
  int32_t records[4][3], results[4];
  for (;;) {
    memset(records, 0, sizeof records);
    size_t count = fread(records, sizeof records[0], 4, stdin);
    if (!count) break;
    int32x4x3_t columns = vld3q_s32(records[0]);
    vst1q_s32(results, apply(columns.val[0], columns.val[1], columns.val[2]));
    if (fwrite(results, sizeof results[0], count, stdout) != count) return 1;
  }
  return ferror(stdin) || fflush(stdout) ? 1 : 0;
}
