/* Slots and bodies that are filled outside the lock. */
#ifndef SHMQ_LOAN_H
#define SHMQ_LOAN_H

#include "handles.h"
#include "producer.h"

struct shmq_loan {
	shmq_producer *p;
	uint32_t fork_generation;
	uint32_t n, targets;
	bool open;
	uint64_t *lengths;
	uint8_t *scratch; /* every channel was ephemeral and full: there is no slot to fill */
	struct target {
		shmq_map *map;
		uint32_t *slots;
		uint8_t **bodies;
		bool current;
	} *target;
};

int loan_begin(shmq_producer *p, const uint64_t *lengths, uint32_t n, bool deferred, int64_t until,
               shmq_loan **out);
uint8_t *loan_body(shmq_loan *loan, uint32_t target, uint32_t i);

#endif
