/* The inner loops of decoding and resizing images: `native.py` calls them and documents them.

   Nothing here needs Python or libjpeg to be compiled. libjpeg is the one that Pillow has loaded, by
   its interface 6.2, which is declared here as far as it is used. Errors of libjpeg must not return
   to it, so this cannot be written in Python with ctypes. */

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__linux__) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define VECTORIZED
#endif

enum { VERSION = 62, SIZE = 632 };  /* of libjpeg's interface, and of its structure there */
enum { GRAYSCALE = 1, RGB = 2 };  /* color spaces */
enum { DONE = 0, REFUSED = 1, DAMAGED = 2 };
enum { AT_ONCE = 16 };  /* rows that are asked for, of which libjpeg decodes one or two */
enum { LANES = 4 };  /* the most channels of an image */

typedef struct Decoder Decoder;

typedef struct {
  void (*error_exit)(Decoder *);
  void (*emit_message)(Decoder *, int level);
  void *rest[30];  /* more than libjpeg writes */
  jmp_buf failed;
  int warnings;
} Errors;

struct Decoder {
  Errors *errors;
  void *memory, *progress, *client_data;
  int is_decompressor, global_state;
  void *source;
  unsigned image_width, image_height;
  int num_components, jpeg_color_space, out_color_space;
  char rest[SIZE];  /* libjpeg refuses to work if its structure has another size than SIZE */
};

/* In the order of `native.FUNCTIONS`. */
typedef struct {
  void *(*std_error)(Errors *);
  void (*create)(Decoder *, int version, size_t size);
  void (*read_from)(Decoder *, const uint8_t *data, unsigned long length);
  int (*read_header)(Decoder *, int require_image);
  int (*start)(Decoder *);
  void (*crop)(Decoder *, unsigned *left, unsigned *width);
  unsigned (*skip)(Decoder *, unsigned rows);
  unsigned (*read)(Decoder *, uint8_t **rows, unsigned count);
  void (*destroy)(Decoder *);
} Library;

static void fail(Decoder *decoder) { longjmp(decoder->errors->failed, 1); }

static void count_warning(Decoder *decoder, int level) { decoder->errors->warnings += level < 0; }

static void decode(const Library *jpeg, Decoder *decoder, unsigned y, unsigned x, unsigned height,
                   unsigned width, int channels, uint8_t *window) {
  unsigned left = x, columns = width;
  jpeg->start(decoder);
  jpeg->crop(decoder, &left, &columns);
  if (left != x || columns != width) fail(decoder);
  if (y) jpeg->skip(decoder, y);
  for (unsigned now = 0; now < height;) {
    uint8_t *rows[AT_ONCE];
    unsigned count = height - now < AT_ONCE ? height - now : AT_ONCE;
    for (unsigned k = 0; k < count; k++) rows[k] = window + (size_t)(now + k) * width * channels;
    unsigned done = jpeg->read(decoder, rows, count);
    if (!done) fail(decoder);
    now += done;
  }
}

int decode_window(const Library *jpeg, const uint8_t *data, size_t length, int y, int x, int height,
                  int width, int channels, uint8_t *window) {
  Decoder decoder;
  Errors errors;
  memset(&decoder, 0, sizeof decoder);
  decoder.errors = &errors;
  jpeg->std_error(&errors);
  errors.error_exit = fail;
  errors.emit_message = count_warning;
  errors.warnings = 0;
  volatile int outcome = REFUSED;
  if (!setjmp(errors.failed)) {
    jpeg->create(&decoder, VERSION, SIZE);
    jpeg->read_from(&decoder, data, (unsigned long)length);
    jpeg->read_header(&decoder, 1);
    decoder.out_color_space = channels == 1 ? GRAYSCALE : RGB;
    if (y + height <= (int)decoder.image_height && x + width <= (int)decoder.image_width) {
      decode(jpeg, &decoder, y, x, height, width, channels, window);
      outcome = errors.warnings ? DAMAGED : DONE;
    }
  }
  jpeg->destroy(&decoder);
  return outcome;
}

/* A sparse matrix of weights by its rows (CSR). */
typedef struct {
  const int32_t *starts, *columns;
  const float *weights;
  int rows;
} Weights;

typedef float Pixel __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));

VECTORIZED
void resample(const uint8_t *restrict image, ptrdiff_t stride, int width, int channels,
              const Weights *down, const Weights *across, float slack, float *restrict sums,
              uint8_t *restrict out) {
  int values = width * channels;
  for (int i = 0; i < down->rows; i++) {
    memset(sums, 0, sizeof(float) * (values + LANES));
    for (int k = down->starts[i]; k < down->starts[i + 1]; k++) {
      const uint8_t *restrict row = image + down->columns[k] * stride;
      float weight = down->weights[k];
      for (int j = 0; j < values; j++) sums[j] += weight * (float)row[j];
    }
    for (int j = 0; j < across->rows; j++) {
      Pixel sum = {0}, one;
      for (int k = across->starts[j]; k < across->starts[j + 1]; k++) {
        memcpy(&one, sums + across->columns[k] * channels, sizeof one);
        sum += across->weights[k] * one;
      }
      Integers whole = __builtin_convertvector(sum + slack, Integers);
      for (int c = 0; c < channels; c++) *out++ = (uint8_t)whole[c];
    }
  }
}
