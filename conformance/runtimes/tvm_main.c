/* Calls functions that TVM compiled for AArch64: `LAYERS` holds X(f0) X(f1) ..., one function per layer.

   usage: tvm_main ROWS COLUMNS < accumulators > results

   Layer i reads ROWS * COLUMNS little-endian int32 and writes as many. The structures are those of TVM's C ABI (DLPack's
   DLTensor, tvm-ffi's TVMFFIAny), declared here so that no header of TVM is needed. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Tensor;

typedef struct {
  int32_t type_index;
  uint32_t padding;
  void *value;
} Any;

enum { CPU = 1, SIGNED_INTEGER = 0, TENSOR_POINTER = 7 };

typedef int Function(void *self, const Any *arguments, int32_t count, Any *result);

/* The one symbol of the runtime that such a function needs: how it reports a wrong argument. */
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  fprintf(stderr, "%s: ", kind);
  for (int32_t i = 0; i < count; i++)
    if (parts[i]) fputs(parts[i], stderr);
  fputc('\n', stderr);
}

#define X(name) extern Function __tvm_ffi_##name;
LAYERS
#undef X
#define X(name) __tvm_ffi_##name,
static Function *const FUNCTIONS[] = {LAYERS};

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  int64_t shape[2] = {atoll(argv[1]), atoll(argv[2])};
  size_t count = (size_t)(shape[0] * shape[1]);
  int32_t *data[2] = {aligned_alloc(64, (count * 4 + 63) / 64 * 64), aligned_alloc(64, (count * 4 + 63) / 64 * 64)};
  for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++) {
    Tensor tensors[2];
    Any arguments[2], result = {0};
    for (int k = 0; k < 2; k++) {
      tensors[k] = (Tensor){data[k], CPU, 0, 2, SIGNED_INTEGER, 32, 1, shape, NULL, 0};
      arguments[k] = (Any){TENSOR_POINTER, 0, &tensors[k]};
    }
    if (fread(data[0], 4, count, stdin) != count) return 1;
    if (FUNCTIONS[i](NULL, arguments, 2, &result)) return 1;
    if (fwrite(data[1], 4, count, stdout) != count) return 1;
  }
  return fflush(stdout) ? 1 : 0;
}
