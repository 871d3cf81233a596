/* Sums of products of 8-bit codes and weights for a Cortex-M. The compiler's flags choose one of three forms:
 *
 * - Helium (__ARM_FEATURE_MVE): 16 products an instruction.
 * - The DSP extension (__ARM_FEATURE_DSP): two products an instruction.
 * - Plain loops, which run everywhere.
 *
 * Every form computes the same integers. The functions are not inlined: all layers of a file share them in flash.
 *
 * The weights of a feature lie one behind the other, in a row of `size` codes. Behind the last row a table of weights
 * goes on, since functions read up to 15 codes more than they need.
 * A patch holds the codes under the windows of one or two positions, `own`, in the order in which sums are computed.
 * Codes that are not filled in must be 0.
 *
 * QJAX_PATCH           how many words it takes; QJAX_PLACE: where the code `at` of the position `p` is in it. at: in fours.
 * QJAX_LINE            memory of the codes of a position, where no four of them lie together. QJAX_SPREAD_i8/u8: brings
 *                      them to the patch, if it is another.
 * qjax_fill_i8/u8      copies n codes to a place in a patch; n: in fours.
 * qjax_sums1_i8/u8     start + the products of a patch of one position with the weights of at least 4 features.
 * qjax_sums2_i8/u8     the same of two positions, for at least 2 features. The sums of the second position come last.
 * qjax_channels_i8/u8  the sums of a depthwise convolution at one position, of at least 8 channels, from `first` on.
 *                      rows[t]: the codes of all channels under the tap t. stride: of the weights of a tap, none of
 *                      which is -128.
 * qjax_codes           from sums to codes: ((high word of (sum << up) * factor) + offset) >> shift, clamped.
 * qjax_sides           the same with another offset below `kink`.
 */
#if defined(__GNUC__)
#define QJAX_KERNEL __attribute__((noinline, unused)) static
#else
#define QJAX_KERNEL static inline
#endif
