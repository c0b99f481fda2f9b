/* The inner loops of decoding, resizing and changing images: `native.py` calls them and documents
   them.

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
enum { AT_ONCE = 16 };  /* rows that are asked for, of which libjpeg decodes one or two */
enum { LANES = 4 };  /* the most channels of an image that is resampled */

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

/* Decode rows, and those columns that make up whole blocks with the ones asked for. */
static int decode(const Library *jpeg, Decoder *decoder, unsigned y, unsigned x, unsigned height,
                  unsigned width, unsigned spare, int channels, uint8_t *rows) {
  unsigned left = x, columns = width;
  jpeg->start(decoder);
  jpeg->crop(decoder, &left, &columns);
  if (columns > width + spare) fail(decoder);
  if (y) jpeg->skip(decoder, y);
  for (unsigned now = 0; now < height;) {
    uint8_t *next[AT_ONCE];
    unsigned count = height - now < AT_ONCE ? height - now : AT_ONCE;
    for (unsigned k = 0; k < count; k++) next[k] = rows + (size_t)(now + k) * columns * channels;
    unsigned done = jpeg->read(decoder, next, count);
    if (!done) fail(decoder);
    now += done;
  }
  return (int)left;
}

/* Return the first column that was decoded: x, or up to `spare` columns before it; -1 for a file
   that is damaged. `rows` has room for `width + spare` columns. */
int decode_window(const Library *jpeg, const uint8_t *data, size_t length, int y, int x, int height,
                  int width, int spare, int channels, uint8_t *rows) {
  Decoder decoder;
  Errors errors;
  memset(&decoder, 0, sizeof decoder);
  decoder.errors = &errors;
  jpeg->std_error(&errors);
  errors.error_exit = fail;
  errors.emit_message = count_warning;
  errors.warnings = 0;
  volatile int left = -1;
  if (!setjmp(errors.failed)) {
    jpeg->create(&decoder, VERSION, SIZE);
    jpeg->read_from(&decoder, data, (unsigned long)length);
    jpeg->read_header(&decoder, 1);
    decoder.out_color_space = channels == 1 ? GRAYSCALE : RGB;
    if (y + height <= (int)decoder.image_height && x + width <= (int)decoder.image_width) {
      int found = decode(jpeg, &decoder, y, x, height, width, spare, channels, rows);
      if (!errors.warnings) left = found;
    }
  }
  jpeg->destroy(&decoder);
  return left;
}

/* The old rows or columns that each new one is a sum of, and their weights: [count, taps]. */
typedef struct {
  const int32_t *from;
  const float *weights;
  int count, taps;
} Weights;

typedef float Pixel __attribute__((vector_size(LANES * sizeof(float))));

static inline __attribute__((always_inline)) void weigh_columns(
    const float *restrict row, int channels, const Weights *across, int taps, float *restrict out) {
  const int32_t *from = across->from;
  const float *weights = across->weights;
  for (int j = 0; j < across->count; j++, out += channels) {
    Pixel sum = {0}, one;
    for (int k = 0; k < taps; k++) {
      memcpy(&one, row + *from++ * channels, sizeof one);
      sum += *weights++ * one;
    }
    memcpy(out, &sum, sizeof sum);
  }
}

/* `sums` has room for a row of the image and one of the result, each with LANES values more. */
VECTORIZED
void resample(const uint8_t *restrict image, ptrdiff_t stride, int width, int channels,
              const Weights *down, const Weights *across, float slack, float *restrict sums,
              uint8_t *restrict out) {
  int old = width * channels, new = across->count * channels;
  float *made = sums + old + LANES;
  for (int i = 0; i < down->count; i++, out += new) {
    memset(sums, 0, sizeof(float) * (old + LANES));
    for (int k = i * down->taps; k < (i + 1) * down->taps; k++) {
      const uint8_t *restrict row = image + down->from[k] * stride;
      float weight = down->weights[k];
      for (int j = 0; j < old; j++) sums[j] += weight * (float)row[j];
    }
    if (across->taps == 2) weigh_columns(sums, channels, across, 2, made);  /* unrolled */
    else weigh_columns(sums, channels, across, across->taps, made);
    for (int j = 0; j < new; j++) out[j] = (uint8_t)(int32_t)(made[j] + slack);
  }
}

/* The number of places where `second` follows `first`. */
size_t count_pairs(const uint8_t *data, size_t length, int first, int second) {
  size_t found = 0;
  const uint8_t *end = data + length;
  for (const uint8_t *at = data; at < end && (at = memchr(at, first, end - at)); at++)
    found += at + 1 < end && at[1] == second;
  return found;
}

/* The images below are rows of pixels without gaps; `values` is the number of their bytes. */

VECTORIZED
void mirror(const uint8_t *restrict image, ptrdiff_t stride, int height, int width, int channels,
            uint8_t *restrict out) {
  for (int y = 0; y < height; y++) {
    const uint8_t *row = image + y * stride + (width - 1) * channels;
    if (channels == 3) {
      for (int x = 0; x < width; x++, row -= 3, out += 3)
        out[0] = row[0], out[1] = row[1], out[2] = row[2];
    } else {
      for (int x = 0; x < width; x++, row -= channels)
        for (int c = 0; c < channels; c++) *out++ = row[c];
    }
  }
}

/* `tables` has 256 bytes for all channels, or, with `own`, for each. */
void look_up(const uint8_t *restrict image, size_t values, int channels,
             const uint8_t *restrict tables, int own, uint8_t *restrict out) {
  size_t step = own ? 256 : 0;
  if (channels == 3) {
    const uint8_t *second = tables + step, *third = second + step;
    for (size_t i = 0; i + 2 < values; i += 3) {
      out[i] = tables[image[i]];
      out[i + 1] = second[image[i + 1]];
      out[i + 2] = third[image[i + 2]];
    }
  } else {
    for (size_t i = 0; i < values; i++) out[i] = tables[i % channels * step + image[i]];
  }
}

/* `counts` has 256 numbers for each channel, all 0. */
void count_values(const uint8_t *restrict image, size_t values, int channels,
                  int64_t *restrict counts) {
  if (channels == 3) {
    for (size_t i = 0; i + 2 < values; i += 3) {
      counts[image[i]]++;
      counts[256 + image[i + 1]]++;
      counts[512 + image[i + 2]]++;
    }
  } else {
    for (size_t i = 0; i < values; i++) counts[i % channels * 256 + image[i]]++;
  }
}

VECTORIZED
void blend(const uint8_t *restrict first, const uint8_t *restrict second, size_t values,
           float share, uint8_t *restrict out) {
  for (size_t i = 0; i < values; i++) {
    float sum = (float)first[i] + share * (float)((int)second[i] - (int)first[i]);
    sum = sum < 0.0f ? 0.0f : sum > 255.0f ? 255.0f : sum;
    out[i] = (uint8_t)(int32_t)sum;
  }
}

VECTORIZED
void to_gray(const uint8_t *restrict image, size_t pixels, uint8_t *restrict out) {
  for (size_t i = 0; i < pixels; i++) {
    const uint8_t *p = image + 3 * i;
    uint8_t gray = (uint8_t)((p[0] * 19595u + p[1] * 38470u + p[2] * 7471u + 0x8000u) >> 16);
    out[3 * i] = out[3 * i + 1] = out[3 * i + 2] = gray;
  }
}

/* `out` is a copy of the image, whose border stays. */
VECTORIZED
void smooth(const uint8_t *restrict image, int height, int width, int channels,
            uint8_t *restrict out) {
  ptrdiff_t row = (ptrdiff_t)width * channels;
  for (int y = 1; y < height - 1; y++) {
    const uint8_t *above = image + (y - 1) * row, *here = above + row, *below = here + row;
    for (ptrdiff_t i = channels; i < row - channels; i++) {
      uint16_t sum = (uint16_t)(above[i - channels] + above[i] + above[i + channels]
          + here[i - channels] + 5 * here[i] + here[i + channels]
          + below[i - channels] + below[i] + below[i + channels] + 6);
      out[y * row + i] = (uint8_t)(sum / 13);
    }
  }
}

/* Nearest pixels, as Pillow finds them: in steps of 2^-16 of a pixel. All positions fit. */
void move(const uint8_t *restrict image, int height, int width, int channels,
          const int32_t *restrict steps, int fill, uint8_t *restrict out) {
  int32_t x0 = steps[2], y0 = steps[5];
  for (int i = 0; i < height; i++, x0 += steps[1], y0 += steps[4]) {
    int32_t x = x0, y = y0;
    for (int j = 0; j < width; j++, x += steps[0], y += steps[3], out += channels) {
      int from = x >> 16, row = y >> 16;
      if (from >= 0 && from < width && row >= 0 && row < height) {
        const uint8_t *pixel = image + ((ptrdiff_t)row * width + from) * channels;
        for (int c = 0; c < channels; c++) out[c] = pixel[c];
      } else {
        for (int c = 0; c < channels; c++) out[c] = (uint8_t)fill;
      }
    }
  }
}
