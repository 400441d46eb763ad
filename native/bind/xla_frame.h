// What XLA hands to a function that it calls: the parts of the C interface of its FFI that we use, as our own
// declarations, so that no build needs XLA's headers (ADR 33). tests/pool/native/test_xla_frame.py compares them with
// the headers of the jaxlib that is installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace envfleet::xla {

// Structs begin with their size: later versions of the interface only append fields. Ours may end earlier.

struct Extension {
  std::size_t struct_size;
  std::int32_t type;
  Extension* next;
};
inline constexpr std::int32_t kMetadataExtension = 1;

struct ApiVersion {
  std::size_t struct_size;
  Extension* extensions;
  std::int32_t major;
  std::int32_t minor;
};
inline constexpr ApiVersion kOldestVersion{sizeof(ApiVersion), nullptr, 0, 1};  // that we have looked at

enum class Code : std::int32_t {  // as absl::Status has them
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kFailedPrecondition = 9,
  kInternal = 13,
};

struct Error;  // XLA's

struct ErrorToCreate {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;
  Code code;
};

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  ApiVersion version;
  const void* internal;
  Error* (*create_error)(ErrorToCreate*);
};

enum class Type : std::int32_t {
  kBool = 1,
  kInt8 = 2,
  kInt32 = 4,
  kInt64 = 5,
  kUint8 = 6,
  kFloat32 = 11,
  kFloat64 = 12,
};

struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  Type type;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;

  std::size_t num_elements() const {
    std::size_t product = 1;
    for (std::int64_t i = 0; i < rank; ++i) product *= static_cast<std::size_t>(dims[i]);
    return product;
  }
};

/// Arguments, or results.
struct Buffers {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* kinds;
  Buffer** buffers;
};
inline constexpr std::int32_t kBufferKind = 1;

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  std::int32_t stage;
  Buffers arguments;
  Buffers results;
};

struct Metadata {
  std::size_t struct_size;
  ApiVersion version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

using Handler = Error*(CallFrame*);

/// Why a call fails; XLA tells the program.
class Refusal : public std::runtime_error {
 public:
  Refusal(Code code, const std::string& message) : std::runtime_error(message), code(code) {}
  Code code;
};

inline Error* error_of(const CallFrame& frame, Code code, const char* message) {
  ErrorToCreate error{sizeof(ErrorToCreate), nullptr, message, code};
  return frame.api->create_error(&error);
}

/// XLA asks once, when a function is registered, which version of the interface it was written for.
inline bool answer_metadata(const CallFrame& frame) {
  if (frame.extensions == nullptr || frame.extensions->type != kMetadataExtension) return false;
  Metadata& metadata = *reinterpret_cast<MetadataExtension*>(frame.extensions)->metadata;
  // What we use is the same in all versions with this major number, as XLA promises. Those that do not say which one
  // they are (jaxlib 0.8 and before) are the oldest.
  metadata.version = kOldestVersion;
  if (frame.api != nullptr && frame.api->version.major == kOldestVersion.major) {
    metadata.version.minor = frame.api->version.minor;
  }
  metadata.traits = 0;
  return true;
}

/// Buffer i of the arguments or results, of which there must be more than i.
inline Buffer& buffer_of(const Buffers& buffers, std::int64_t i) {
  if (i >= buffers.size || buffers.kinds[i] != kBufferKind || buffers.buffers[i]->struct_size < sizeof(Buffer)) {
    throw Refusal(Code::kInternal, "XLA passed other buffers than envfleet asked for");
  }
  return *buffers.buffers[i];
}

}  // namespace envfleet::xla
