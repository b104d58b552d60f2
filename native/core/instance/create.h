/* The header that every new segment begins with, and the instance's limits. */
#ifndef SHMQ_CREATE_H
#define SHMQ_CREATE_H

#include "memory/layout.h"
#include "shmq.h"

void segment_fill(shmq_segment_desc *s, enum shmq_segment_kind kind, uint64_t size, uint64_t serial,
                  const uint64_t instance[2]);
/* Reserve the parts that are used from the start, or everything if pages cannot be reserved
 * later. */
int segment_reserve(int fd, uint8_t *base, uint64_t size, uint64_t first);
void limits_store(shmq_limits_desc *to, const shmq_limits *from);

#endif
