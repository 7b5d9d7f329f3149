// Says which file it was where a mapped page cannot be had.
//
// A page that the disk fails to bring, has no room for, or has lost (the file was cut short) raises SIGBUS,
// which ends a process without a word. Within ranges that are watched it ends it with a line and status 2
// instead.
#pragma once

#include <cstdint>
#include <string>

namespace xmlc::cpu {

// Watches [address, address + bytes); returns false where too many are watched already.
bool watch_pages(std::uintptr_t address, std::int64_t bytes, const std::string& message);

// Watches it no more: the range may soon be another's.
void forget_pages(std::uintptr_t address);

}  // namespace xmlc::cpu
