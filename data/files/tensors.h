// Reads and writes the parameters of a table as tensors of a file, with the shapes and the order of Hugging Face.
#pragma once

#include <cmath>
#include <limits>

#include "data/files/safetensors.h"
#include "model/parameters.h"
#include "parallel/gather.h"

namespace streambp {

// Groups the entries of the table by stored tensor: one entry, or the parts of a fused tensor.
template <class T>
std::vector<Table<T>> by_stored_tensor(const Table<T>& table) {
  std::vector<Table<T>> groups;
  std::map<std::string, std::size_t> position;
  for (const Entry<T>& e : table) {
    const auto [found, is_new] = position.try_emplace(e.parameter.name, groups.size());
    if (is_new) groups.emplace_back();
    groups[found->second].push_back(e);
  }
  return groups;
}

// An expert's b (model/grouped_linear.h): in files, the numbers of all experts for an output and a rank are together.
inline bool in_turn_by_expert(const Parameter& p) { return p.experts > 0 && p.init == Init::adapter_b; }

template <class T>
std::vector<std::int64_t> stored_shape(const Table<T>& parts) {
  const Parameter& p = parts.front().parameter;
  Index length = 0;
  for (const Entry<T>& e : parts) length += e.parameter.length();
  if (p.vector()) {
    const Index pieces = most(p.experts, p.heads);
    return pieces > 0 ? std::vector<std::int64_t>{pieces, length / pieces} : std::vector{length};
  }
  if (in_turn_by_expert(p)) return {length / p.experts, p.cols * p.experts};
  if (p.per_channel) return {length, 1, p.cols};
  if (p.experts > 0 && p.transposed) return {p.experts, p.cols, length / p.experts};
  if (p.experts > 0) return {p.experts, length / p.experts, p.cols};
  if (p.transposed) return {p.cols, length};
  return {length, p.cols};
}

// What takes turns in a stored tensor: the rows of a matrix, or the numbers of a vector.
inline Index line_width(const Parameter& p) { return p.vector() ? 1 : p.cols; }

// Where a line of a part is in a stored tensor of this shape. `before`: the length of the parts before it.
inline Index stored_line(const Parameter& p, const std::vector<std::int64_t>& shape, Index before, Index line) {
  if (p.turn == 0) return before + line;
  const Index outputs = shape[(p.experts > 0) + p.transposed], lines = p.experts > 0 ? p.experts * outputs : outputs,
              turns = p.length() / p.turn;
  return (line / p.turn * lines + before) / turns + line % p.turn;
}

// Where the numbers of a line are in a stored tensor.
struct StoredNumbers {
  Index first, step;
};
inline StoredNumbers stored_numbers(const Parameter& p, const std::vector<std::int64_t>& shape, Index before,
                                    Index line) {
  const Index outputs = p.rows / most(p.experts, 1);
  if (in_turn_by_expert(p)) {
    const Index output = line % outputs,
                row = p.turn == 1 ? output * (shape[0] / outputs) + p.part : before / p.experts + output;
    return {row * shape[1] + line / outputs, p.experts};
  }
  const Index at = stored_line(p, shape, before, line);
  if (!p.transposed) return {at * line_width(p), 1};
  const Index all = shape.back();  // outputs of the tensor, or of an expert in it
  return {at / all * all * p.cols + at % all, all};
}

// Reads lines of a part.
template <class T>
void read_lines(const Tensor& tensor, const Parameter& p, Index before, Rows lines, T* out) {
  const Index width = line_width(p);
  if (in_turn_by_expert(p)) {
    for (Index line = lines.begin; line < lines.end; ++line) {
      const auto [first, step] = stored_numbers(p, tensor.shape, before, line);
      for (Index j = 0; j < width; ++j) read(tensor, first + j * step, 1, out++);
    }
    return;
  }
  std::vector<T> column;
  const Index length = p.transposed && p.turn <= 1 ? p.rows / most(p.experts, 1) : p.turn;
  for (Rows run = lines; run.begin < lines.end; out += run.size() * width, run.begin = run.end) {
    run.end = length > 0 ? least(lines.end, round_up(run.begin + 1, length)) : lines.end;
    const auto [first, step] = stored_numbers(p, tensor.shape, before, run.begin);
    if (!p.transposed) {
      read(tensor, first, run.size() * width, out);
      continue;
    }
    const Index apart = run.size() > 1 ? stored_numbers(p, tensor.shape, before, run.begin + 1).first - first : 1;
    column.resize((run.size() - 1) * apart + 1);
    for (Index j = 0; j < width; ++j) {
      read(tensor, first + j * step, std::ssize(column), column.data());
      for (Index i = 0; i < run.size(); ++i) out[i * width + j] = column[i * apart];
    }
  }
}

template <class T>
const char* dtype_name() {
  return std::is_same_v<T, BFloat16> ? "BF16" : sizeof(T) == 1 ? "U8" : sizeof(T) == 4 ? "F32" : "F64";
}
// Of a tensor in memory.
template <class T>
const char* dtype_name(const Table<T>& parts) {
  return parts.front().wide ? dtype_name<Accumulator<T>>() : dtype_name<T>();
}

// NaN and infinity have the largest exponent. The loop has no branches, so that it vectorises.
template <class T>
requires(!std::is_integral_v<T>) bool all_finite(const T* x, Index n) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;
  const Bits infinity = std::bit_cast<Bits>(static_cast<T>(std::numeric_limits<float>::infinity()));
  Bits largest = 0;
#pragma omp simd reduction(max : largest)
  for (Index i = 0; i < n; ++i) {
    const auto exponent = static_cast<Bits>(std::bit_cast<Bits>(x[i]) & infinity);
    largest = exponent > largest ? exponent : largest;
  }
  return largest < infinity;
}

inline bool all_finite(const std::uint8_t*, Index) { return true; }

// Rows of about a megabyte.
template <class T, class AnyMatrix>
Index rows_of_block(const AnyMatrix& m) {
  return std::clamp<Index>((1 << 20) / static_cast<Index>(sizeof(T)) / m.cols, 1, m.rows);
}

// Produces some rows of a matrix in blocks, on several threads.
template <class T, class AnyMatrix, class F>
bool produce_rows(T* out, Rows part, const AnyMatrix& m, F&& produce) {
  const Index rows = rows_of_block<T>(m);
  bool good = true;
#pragma omp parallel for reduction(&& : good) schedule(dynamic)
  for (Index begin = part.begin; begin < part.end; begin += rows) {
    good = produce(Rows{begin, std::min(part.end, begin + rows)}, out + (begin - part.begin) * m.cols) && good;
  }
  return good;
}

// Fills a matrix on the device, near or far, in blocks of about a megabyte. produce(rows, out) writes some rows and
// returns whether they are valid; several threads call it at once. Returns whether all rows are valid.
template <class Device, template <class> class AnyMatrix, class T, class F>
bool fill(Device& dev, AnyMatrix<T> matrix, F&& produce) {
  constexpr bool near = std::is_same_v<AnyMatrix<T>, Matrix<T>>;
  if constexpr (near && std::is_same_v<Device, Cpu>) {
    return produce_rows(matrix.data, {0, matrix.rows}, matrix, produce);
  } else {
    const Index rows = least(matrix.rows, near ? 32 * rows_of_block<T>(matrix) : kFarRows);
    std::vector<T> staging(rows * matrix.cols);
    bool good = true;
    for (Index begin = 0; begin < matrix.rows; begin += rows) {
      const Rows part = {begin, least(begin + rows, matrix.rows)};
      good = produce_rows(staging.data(), part, matrix, produce) && good;
      dev.upload(matrix.slice(part), staging.data());
    }
    return good;
  }
}

// Reads every tensor of the table from `files` (a SafetensorsFile or a ModelFiles), under prefix + name. NaN and
// infinity are errors. If ranks share the table, this rank reads its shard of each tensor.
template <class Device, class Files, class T>
void read_tensors(Device& dev, const Files& files, const std::string& prefix, const Table<T>& table,
                  const Group& ranks = {}) {
  for (const Table<T>& parts : by_stored_tensor(table)) {
    const Tensor& tensor = files.at(prefix + parts.front().parameter.name);
    const auto shape = stored_shape(parts);
    require(tensor.shape == shape, tensor.where, " has shape ", shown(tensor.shape), ", but the configuration needs ",
            shown(shape));
    if constexpr (std::is_integral_v<T>) {
      require(tensor.dtype == dtype_name<T>(), tensor.where, " has type ", tensor.dtype, ", not ", dtype_name<T>(),
              "; the file is damaged, use an earlier checkpoint");
    } else {
      require(is_real(tensor), tensor.where, ": cannot read type ", tensor.dtype, " as real numbers; convert the file");
    }
    Index before = 0;
    for (const Entry<T>& e : parts) {
      const Parameter& p = e.parameter;
      auto produce = [&](Index first, Rows part, auto* out) {
        const Rows rows = {first + part.begin, first + part.end};
        read_lines(tensor, p, before, p.vector() ? Rows{0, p.cols} : rows, out);
        return all_finite(out, rows.size() * p.cols);
      };
      const bool finite = e.with_matrix([&](auto m) {
        const Index first = m.rows < p.rows ? shard(p.rows, ranks).begin : 0;
        return m.empty() || fill(dev, m, [&](Rows part, auto* out) { return produce(first, part, out); });
      });
      require(finite, tensor.where,
              " holds a NaN or an infinity; the file is damaged, use another one or an earlier checkpoint");
      before += p.length();
    }
    forget(tensor);
  }
}

// Writes values in the stored type. Values outside its range are errors.
template <class Stored, class T>
void write_numbers(std::ostream& out, const std::string& where, const std::vector<T>& values) {
  std::vector<Stored> stored(values.size());
  bool finite = true;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if constexpr (std::is_same_v<Stored, T>) {
      stored[i] = values[i];
    } else {
      stored[i] = static_cast<Stored>(static_cast<float>(values[i]));
    }
    finite &= std::isfinite(static_cast<float>(stored[i]));
  }
  require(finite, where,
          ": holds a NaN, an infinity, or a value out of range for the type of the file; nothing was written. "
          "Try a lower --rate, or a wider --save-dtype");
  out.write(reinterpret_cast<const char*>(stored.data()), static_cast<std::streamsize>(stored.size() * sizeof(Stored)));
}

// Calls f(numbers) for the numbers of a stored tensor, in its order and block by block. A transposed tensor, such as those
// of GPT-2's layers, or one with parts that take turns is one block. Of the ranks that share the table, rank 0 does so.
template <class Device, class T, class F>
void stored_blocks(Device& dev, const Table<T>& parts, const Group& ranks, F&& f) {
  const auto shape = stored_shape(parts);
  const Parameter& first = parts.front().parameter;
  const bool in_order = !first.transposed && first.turn == 0 && !in_turn_by_expert(first);
  std::vector<T> stored;
  if (!in_order && ranks.rank == 0)
    stored.resize(static_cast<std::size_t>(element_count(parts.front().parameter.name, shape)));
  Index before = 0;
  for (const Entry<T>& e : parts) {
    const Parameter& p = e.parameter;
    const Index width = line_width(p);
    Index line = 0;
    auto scatter = [&](const std::vector<T>& numbers) {
      for (auto n = numbers.begin(); n != numbers.end(); ++line) {
        const auto [first, step] = stored_numbers(p, shape, before, line);
        for (Index j = 0; j < width; ++j) stored[first + j * step] = *n++;
      }
    };
    e.with_matrix([&]<template <class> class M, class U>(M<U> m) {
      rows_on_first<U>(dev, ranks, m, p.rows, [&](const std::vector<U>& numbers) {
        if (in_order) return f(numbers);
        if constexpr (std::is_same_v<U, T>) scatter(numbers);
      });
    });
    before += p.length();
  }
  if (!stored.empty()) f(stored);
}

// Writes the values of these parameters, which are a stored tensor, in the given type.
template <class Device, class T>
void write_values(Device& dev, std::ostream& out, const std::string& name, const Table<T>& parts,
                  const std::string& dtype, const Group& ranks = {}) {
  stored_blocks(dev, parts, ranks, [&]<class U>(const std::vector<U>& values) {
    if (dtype == dtype_name<U>()) return write_numbers<U>(out, name, values);
    if (dtype == "F32") return write_numbers<float>(out, name, values);
    if (dtype == "BF16") return write_numbers<BFloat16>(out, name, values);
    if (dtype == "F16") return write_numbers<Float16>(out, name, values);
    fail(name, ": ", dtype, " is not supported for saving weights");
  });
}

// Writes the tensor that consists of these parameters. If ranks share the table, all of them call this, and rank 0 writes.
template <class Device, class T>
void write_tensor(Device& dev, SafetensorsWriter& writer, const std::string& name, const Table<T>& parts,
                  const std::string& dtype, const Group& ranks = {}) {
  writer.add(name, dtype, stored_shape(parts),
             [=, &dev](std::ostream& out) { write_values(dev, out, name, parts, dtype, ranks); });
}

template <class Device, class T>
void write_tensors(Device& dev, SafetensorsWriter& writer, const std::string& prefix, const Table<T>& table,
                   const Group& ranks = {}) {
  for (const Table<T>& parts : by_stored_tensor(table))
    write_tensor(dev, writer, prefix + parts.front().parameter.name, parts, dtype_name(parts), ranks);
}

}  // namespace streambp
