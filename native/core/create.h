/* The common head of a new segment. */
#ifndef SHMQ_CREATE_H
#define SHMQ_CREATE_H

#include "layout.h"

void segment_fill(shmq_segment_desc *s, enum shmq_segment_kind kind, uint64_t size, uint64_t serial,
                  const uint64_t instance[2]);

#endif
