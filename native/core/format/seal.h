/*
 * Seals: the mark of a message that was published by a process which may attach.
 *
 * In memory it is a bit of the slot, because only such processes can write there. On disk it is a
 * tag over topic, id and body, made with the instance's key (SipHash-2-4 with 128 bits): a file that
 * somebody else has put into the data path has none that is right.
 */
#ifndef SHMQ_SEAL_H
#define SHMQ_SEAL_H

#include "shmq.h"

#include <stdbool.h>
#include <stdint.h>

#define SEAL_BYTES 16u

/* Make the tag of a message. key: SHMQ_SEAL_KEY bytes. topic: at most 79 characters count. */
void seal_make(const uint8_t *key, const char *topic, uint64_t id, const void *body,
               uint64_t length, uint8_t tag[SEAL_BYTES]);
/* Returns true if the tag is the message's. The time does not depend on where they differ. A key of
 * zeros, which no instance has, fits nothing. */
bool seal_fits(const uint8_t *key, const char *topic, uint64_t id, const void *body,
               uint64_t length, const uint8_t *tag);

#endif
