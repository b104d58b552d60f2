/*
 * Every death of one operation. It is stepped through once, instruction by instruction. Where a
 * byte of shared memory, a lock, or what was promised has changed, a copy of the segments gets the
 * marks that the kernel would leave, and a fresh process repairs it and is held to the promises
 * (verdict.h). Once in every 50 instructions, at the one that ran least often before, the process is
 * really killed: the bytes must be those of the copy, and are judged again. From some of these deaths the repair itself is stepped through in the
 * same way.
 */
#ifndef DEATH_H
#define DEATH_H

#include "scene.h"

#define LEVELS 3u /* the operation, its repair, the repair after the repairer's death */
#define TOLD 3u   /* violations of an operation that are told in full */

/* How much of it. */
typedef struct plan {
	uint32_t every;   /* judge every n-th change */
	uint32_t real;    /* a real death in every n instructions; 0: none */
	uint32_t sparing; /* to get to them at most one stop for so many instructions; 0: no limit */
	uint32_t phase;   /* which of each n changes, instructions and deaths; 0: the last */
	uint32_t nested;  /* repairs that are stepped through, */
	uint32_t within;  /* judging there every n-th change */
	uint32_t depth;   /* if not 0: only one death, at[0], of its repair at[1], ... */
	uint64_t at[LEVELS];
	bool first; /* the first violation is enough */
} plan;

typedef struct count {
	uint64_t instructions;
	uint64_t copies, deaths; /* of the operation: judged in a copy, real ones */
	uint64_t nested;         /* of repairs, both kinds */
	uint64_t violations;
	bool over;
	char told[TOLD][1024];
} count;

/* Call it in a process of its own; `c` is shared with its parent and grows on the way. */
void death_of(const operation *o, const plan *p, count *c);

#endif
