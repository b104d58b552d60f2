/* The header that every new segment begins with, and the instance's limits. */
#ifndef SHMQ_CREATE_H
#define SHMQ_CREATE_H

#include "layout.h"
#include "shmq.h"

void segment_fill(shmq_segment_desc *s, enum shmq_segment_kind kind, uint64_t size, uint64_t serial,
                  const uint64_t instance[2]);
void limits_store(shmq_limits_desc *to, const shmq_limits *from);

#endif
