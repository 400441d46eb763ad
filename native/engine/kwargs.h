// Kwargs: named values from Python, as an environment's constructor and reset() take them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace envfleet {

/// A value that C++ cannot use. It does no harm until somebody asks for it.
struct Foreign {
  std::string type;
};

using Value =
    std::variant<Foreign, bool, std::int64_t, double, std::string, std::vector<double>, std::vector<std::string>>;

using Values = std::map<std::string, Value, std::less<>>;  // std::less<>: to look a name up allocates nothing

/// Named values. A name that is not there gives the default; one of another type is refused.
class Kwargs {
 public:
  Kwargs() = default;
  explicit Kwargs(Values values, std::set<std::string>* asked = nullptr) : values_(std::move(values)), asked_(asked) {}
  Kwargs(const Kwargs& other) : values_(other.values_) {}  // whoever keeps a copy is not listened to any more
  Kwargs& operator=(const Kwargs& other) {
    values_ = other.values_;
    asked_ = nullptr;
    return *this;
  }

  bool is_none(std::string_view name) const {
    const Value* value = find(name);
    const auto* foreign = value == nullptr ? nullptr : std::get_if<Foreign>(value);
    return foreign != nullptr && foreign->type == "NoneType";
  }

  bool is_text(std::string_view name) const {
    const Value* value = find(name);
    return value != nullptr && std::holds_alternative<std::string>(*value);
  }

  bool flag(std::string_view name, bool fallback) const {
    const Value* value = find(name);
    if (value == nullptr) return fallback;
    if (const auto* flag = std::get_if<bool>(value)) return *flag;
    throw refuse(name, "True or False", *value);
  }

  double number(std::string_view name, double fallback) const {
    const Value* value = find(name);
    if (value == nullptr) return fallback;
    if (const auto* number = std::get_if<double>(value)) return *number;
    if (const auto* number = std::get_if<std::int64_t>(value)) return static_cast<double>(*number);
    if (const auto* flag = std::get_if<bool>(value)) return *flag ? 1.0 : 0.0;
    throw refuse(name, "a number", *value);
  }

  std::string text(std::string_view name, const std::string& fallback) const {
    const Value* value = find(name);
    if (value == nullptr) return fallback;
    if (const auto* text = std::get_if<std::string>(value)) return *text;
    throw refuse(name, "a string", *value);
  }

  std::vector<double> numbers(std::string_view name, const std::vector<double>& fallback) const {
    const Value* value = find(name);
    if (value == nullptr) return fallback;
    if (const auto* numbers = std::get_if<std::vector<double>>(value)) return *numbers;
    throw refuse(name, "a list of numbers", *value);
  }

  std::vector<std::string> texts(std::string_view name, const std::vector<std::string>& fallback) const {
    const Value* value = find(name);
    if (value == nullptr) return fallback;
    if (const auto* texts = std::get_if<std::vector<std::string>>(value)) return *texts;
    throw refuse(name, "a list of strings", *value);
  }

  /// Refuse names that nobody has asked for.
  void require_all_asked() const {
    for (const auto& [name, value] : values_) {
      if (asked_->contains(name)) continue;
      std::string known;
      for (const std::string& each : *asked_) known += (known.empty() ? "" : ", ") + each;
      throw std::invalid_argument("no argument is called '" + name + "'; known: " + (known.empty() ? "none" : known));
    }
  }

 private:
  const Value* find(std::string_view name) const {
    if (asked_ != nullptr) asked_->emplace(name);
    const auto found = values_.find(name);
    return found == values_.end() ? nullptr : &found->second;
  }

  static std::invalid_argument refuse(std::string_view name, const char* expected, const Value& value) {
    static const char* const kTypes[] = {
        "", "a bool", "an int", "a float", "a string", "a list of numbers", "a list of strings"};
    const auto* foreign = std::get_if<Foreign>(&value);
    const std::string got = foreign != nullptr ? foreign->type : kTypes[value.index()];
    std::string text("'");
    text.append(name).append("' must be ").append(expected).append("; got ").append(got);
    return std::invalid_argument(text);
  }

  Values values_;
  std::set<std::string>* asked_ = nullptr;  // names somebody asked for; not kept where threads read
};

}  // namespace envfleet
