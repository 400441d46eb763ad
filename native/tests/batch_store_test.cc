// BatchStore: buffers do not overlap, come back, and are the same bytes for everybody who opens the file.
#include "engine/batch_store.h"

#include <fcntl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/shared_memory.h"

namespace envfleet::test {
namespace {

void fill(BatchStore& store, std::uint32_t buffer) {
  std::memset(store.memory(buffer), static_cast<int>(buffer % 251 + 1), store.layout().buffer_bytes);
}

bool is_filled(BatchStore& store, std::uint32_t buffer) {
  const std::byte* memory = store.memory(buffer);
  const auto expected = static_cast<std::byte>(buffer % 251 + 1);
  const std::size_t last = store.layout().buffer_bytes - 1;
  return memory[0] == expected && memory[last / 2] == expected && memory[last] == expected;
}

void grow_and_check(int fd) {
  BatchStore store(fd, test_layout(4));
  CHECK(store.num_buffers() == 0 && store.num_leased() == 0);
  std::set<std::uint32_t> leased;
  for (std::uint32_t i = 0; i < 200; ++i) {
    const std::uint32_t buffer = store.lease();
    CHECK(buffer == i);
    CHECK(leased.insert(buffer).second);
    fill(store, buffer);
    CHECK(store.num_leased() == i + 1);
  }
  CHECK(store.num_buffers() == 252);  // 4 + 8 + 16 + 32 + 64 + 128
  for (const std::uint32_t buffer : leased) CHECK(is_filled(store, buffer));
  for (const std::uint32_t buffer : leased) store.give_back(buffer);
  CHECK(store.num_leased() == 0);
  for (int i = 0; i < 252; ++i) store.lease();
  CHECK(store.num_buffers() == 252);  // all were used before it grows
}

void grows_in_a_file() { grow_and_check(MemoryFile().fd()); }
void grows_without_a_file() { grow_and_check(-1); }

void the_last_returned_is_leased_first() {
  BatchStore store(-1, test_layout(1));
  for (int i = 0; i < 4; ++i) store.lease();
  for (const std::uint32_t buffer : {2u, 0u, 3u}) store.give_back(buffer);
  for (const std::uint32_t buffer : {3u, 0u, 2u, 4u}) CHECK(store.lease() == buffer);
}

void two_stores_see_the_same_bytes() {
  auto file = std::make_unique<MemoryFile>();
  BatchStore owner(file->fd(), test_layout(3)), reader(file->fd(), test_layout(3));
  file.reset();  // both keep the file open by themselves
  for (std::uint32_t i = 0; i < 40; ++i) {
    const std::uint32_t buffer = owner.lease();
    fill(owner, buffer);
    CHECK(reader.memory(buffer) != owner.memory(buffer) && is_filled(reader, buffer));
    std::memset(reader.memory(buffer), 0, reader.layout().buffer_bytes);
    CHECK(*owner.memory(buffer) == std::byte{0});
    fill(reader, buffer);
  }
  for (std::uint32_t buffer = 0; buffer < 40; ++buffer) CHECK(is_filled(owner, buffer));
}

void columns_do_not_overlap() {
  BatchStore store(-1, test_layout(5));
  std::byte* memory = store.memory(store.lease());
  for (std::size_t field = 0; field < store.layout().fields.size(); ++field) {
    std::memset(store.column<std::byte>(memory, field), static_cast<int>(field),
                5 * store.layout().fields[field].row_bytes);
  }
  for (std::size_t field = 0; field < store.layout().fields.size(); ++field) {
    const std::byte* column = store.column<std::byte>(memory, field);
    for (std::size_t i = 0; i < 5 * store.layout().fields[field].row_bytes; ++i) CHECK(column[i] == std::byte(field));
  }
}

void buffers_come_back_from_any_thread() {
  BatchStore store(-1, test_layout(1));
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 5'000; ++round) {
        const std::uint32_t first = store.lease(), second = store.lease();
        CHECK(first != second);
        store.give_back(first);
        store.give_back(second);
      }
    });
  }
  threads.clear();
  CHECK(store.num_leased() == 0);
  CHECK(store.num_buffers() <= 12);  // six were the most at any time
}

void says_when_there_is_no_memory() {
  const MemoryFile file(MFD_ALLOW_SEALING);
  BatchStore store(file.fd(), test_layout(1));
  for (int i = 0; i < 4; ++i) store.lease();
  fcntl(file.fd(), F_ADD_SEALS, F_SEAL_GROW);
  std::optional<std::system_error> error;
  try {
    store.lease();
  } catch (const std::system_error& caught) {
    error = caught;
  }
  CHECK(error && error->code().value() == EPERM);
  CHECK(store.num_buffers() == 4 && store.num_leased() == 4);
  store.give_back(1);
  CHECK(store.lease() == 1);
}

void refuses_a_closed_file() {
  bool has_thrown = false;
  try {
    BatchStore store(1 << 20, test_layout(1));
  } catch (const std::system_error& error) {
    has_thrown = error.code().value() == EBADF;
  }
  CHECK(has_thrown);
}

}  // namespace

std::vector<Test> batch_store_tests() {
  return {
      {"batch store: grows in a file", grows_in_a_file},
      {"batch store: grows without a file", grows_without_a_file},
      {"batch store: the last returned is leased first", the_last_returned_is_leased_first},
      {"batch store: two stores see the same bytes", two_stores_see_the_same_bytes},
      {"batch store: columns do not overlap", columns_do_not_overlap},
      {"batch store: buffers come back from any thread", buffers_come_back_from_any_thread},
      {"batch store: says when there is no memory", says_when_there_is_no_memory},
      {"batch store: refuses a closed file", refuses_a_closed_file},
  };
}

}  // namespace envfleet::test
