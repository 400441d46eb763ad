// FramePlayer, for Atari envs in their processes: the frames of a step, without the interpreter between them.
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "bind/images.h"
#include "bind/python.h"
#include "imaging/palette_screen.h"

namespace envfleet {
namespace {

/// An array that the emulator writes its screen into.
struct Buffer {
  explicit Buffer(Pair size) {
    npy_intp shape[2] = {static_cast<npy_intp>(size.first), static_cast<npy_intp>(size.second)};
    array = nb::steal(PyArray_ZEROS(2, shape, NPY_UINT8, 0));
    if (!array.is_valid()) throw nb::python_error();
    pixels = static_cast<std::uint8_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
  }
  nb::object array;
  std::uint8_t* pixels;
};

/// An emulator (any object with ALE's methods) and what its screen shows. It is never linked: it stays a Python object.
class FramePlayer {
 public:
  FramePlayer(nb::object emulator, Pair screen, Pair image, bool is_grey, std::uint32_t num_frames, bool lives_count)
      : act_(emulator.attr("act")),
        game_over_(emulator.attr("game_over")),
        num_lives_(emulator.attr("lives")),
        get_screen_(emulator.attr("getScreen")),
        get_colours_(emulator.attr(is_grey ? "getScreenGrayscale" : "getScreenRGB")),
        num_frames_(num_frames),
        lives_count_(lives_count),
        last_(screen),
        before_last_(screen),
        num_pixels_(std::size_t{screen.first} * screen.second),
        screen_(ImageSize{screen.first, screen.second}, ImageSize{image.first, image.second}, is_grey ? 1 : 3) {}

  /// Press a button for the frames of a step, or until the game or a life ends, and show the brighter of the last two.
  /// Returns (reward, has the game ended?, was a life lost?, lives); lives are watched only if they count.
  nb::tuple play(nb::handle button) {
    long reward = 0;
    bool ended = false, lost_life = false, saw_before_last = false;
    for (std::uint32_t frames_left = num_frames_ - 1;; --frames_left) {
      reward += nb::cast<long>(act_(button));
      ended = nb::cast<bool>(game_over_());
      if (lives_count_) {
        const long before = std::exchange(lives_, nb::cast<long>(num_lives_()));
        lost_life = lives_ < before;
      }
      if (ended || lost_life || frames_left == 0) break;
      if (frames_left == 1) {
        look(before_last_, PaletteScreen::kOther);
        saw_before_last = true;
      }
    }
    if (!(ended || lost_life)) {
      look(last_, PaletteScreen::kLast);
      screen_.show(last_.pixels, saw_before_last ? before_last_.pixels : nullptr);
    } else if (saw_before_last) {  // as Gymnasium has it: the frame in which an episode ends is never seen
      screen_.add(before_last_.pixels);
    }
    if (!lives_count_) lives_ = nb::cast<long>(num_lives_());
    return nb::make_tuple(static_cast<double>(reward), ended, lost_life, lives_);
  }

  /// Before the first step of an episode: show the present frame. Returns the lives.
  long start() {
    lives_ = nb::cast<long>(num_lives_());
    look(last_, PaletteScreen::kLast);
    screen_.show(last_.pixels, nullptr);
    return lives_;
  }

  void write_image(nb::handle image) { screen_.write_image(bytes_of(image, screen_.image_bytes(), "the image", true)); }

  /// What lasts from step to step, besides the emulator: lives, and the screen that the last one of an episode is laid
  /// over.
  nb::tuple get_state() const {
    const std::vector<std::uint8_t>& shown = screen_.shown();
    return nb::make_tuple(lives_, nb::bytes(shown.data(), shown.size()));
  }

  void set_state(long lives, nb::bytes shown) {
    if (shown.size() != screen_.shown().size()) throw nb::value_error("the state of a player with another screen");
    screen_.set_shown(static_cast<const std::uint8_t*>(shown.data()));
    lives_ = lives;
  }

 private:
  /// Read the present screen, and learn the colours that are new.
  void look(Buffer& buffer, PaletteScreen::Part part) {
    get_screen_(buffer.array);
    if (screen_.knows(buffer.pixels, part)) return;
    const nb::object colours = get_colours_();
    screen_.learn(buffer.pixels, bytes_of(colours, num_pixels_ * screen_.num_channels(), "colours", false));
  }

  nb::object act_, game_over_, num_lives_, get_screen_, get_colours_;
  std::uint32_t num_frames_;
  bool lives_count_;
  long lives_ = 0;
  Buffer last_, before_last_;
  std::size_t num_pixels_;
  PaletteScreen screen_;
};

void init(FramePlayer* self, nb::object emulator, Pair screen, Pair image, bool is_grey, std::uint32_t num_frames,
          bool lives_count) {
  if (num_frames < 1) throw nb::value_error("a step has at least one frame");
  if (screen.second % PaletteScreen::kRun != 0) throw nb::value_error("a screen's width must be a multiple of 8");
  for (auto [from, to] : {std::pair{screen.first, image.first}, {screen.second, image.second}}) {
    if (to < 1 || to > from || from > AreaResize<std::uint16_t>::kLargest) {
      throw nb::value_error("an image has between 1 pixel and as many as the screen (at most 257) along each axis");
    }
  }
  new (self) FramePlayer(std::move(emulator), screen, image, is_grey, num_frames, lives_count);
}

}  // namespace

void bind_frame_player(nb::module_& m) {
  nb::class_<FramePlayer>(m, "FramePlayer")
      .def("__init__", &init, "emulator"_a, "screen"_a, "image"_a, "is_grey"_a, "num_frames"_a, "lives_count"_a)
      .def("play", &FramePlayer::play)
      .def("start", &FramePlayer::start)
      .def("write_image", &FramePlayer::write_image)
      .def("get_state", &FramePlayer::get_state)
      .def("set_state", &FramePlayer::set_state, "lives"_a, "shown"_a);
}

}  // namespace envfleet
