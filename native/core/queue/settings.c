#include "queue/settings.h"

#include "base/atomics.h"
#include "base/killpoint.h"
#include "base/names.h"
#include "base/status.h"
#include "memory/handles.h"
#include "shmq.h"

#include <string.h>

#define MOST_ATTEMPTS 65535u /* failures are counted in 16 bits */

int settings_check(const shmq_settings *s)
{
	size_t length = strnlen(s->dead_letter, sizeof(s->dead_letter));

	if (s->overflow > SHMQ_OVERFLOW_DROP_NEWEST)
		return fail(SHMQ_INVALID, "overflow %u is none of enum shmq_overflow", s->overflow);
	if (s->flags & ~(uint32_t)(SHMQ_EXPIRED_TO_DEAD | SHMQ_OVERFLOW_TO_DEAD | SHMQ_SEALED_ONLY))
		return fail(SHMQ_INVALID, "flags %#x: unknown bits", s->flags);
	if (s->max_attempts > MOST_ATTEMPTS)
		return fail(SHMQ_INVALID, "max_attempts %u; at most %u", s->max_attempts, MOST_ATTEMPTS);
	if (s->message_ttl < 0)
		return fail(SHMQ_INVALID, "message_ttl is negative; 0: messages do not expire");
	if (s->retry_first < 0 || s->retry_most < s->retry_first)
		return fail(SHMQ_INVALID,
		            "the first retry delay (%lld ns) must be 0 or more, and at most the last "
		            "(%lld ns)",
		            (long long)s->retry_first, (long long)s->retry_most);
	if (length == sizeof(s->dead_letter) || (length && !name_ok(s->dead_letter)))
		return fail(SHMQ_BAD_NAME, "dead_letter is not a valid topic name");
	return 0;
}

bool settings_are_none(const shmq_settings *s)
{
	return !s->max_messages && !s->max_bytes && !s->message_ttl && !s->retry_first &&
	       !s->max_attempts && s->overflow == SHMQ_OVERFLOW_DISK &&
	       !(s->flags & ~(uint32_t)SHMQ_SEALED_ONLY) && !*s->dead_letter;
}

bool settings_equal(const shmq_settings *a, const shmq_settings *b)
{
	return a->max_messages == b->max_messages && a->max_bytes == b->max_bytes &&
	       a->message_ttl == b->message_ttl && a->retry_first == b->retry_first &&
	       a->retry_most == b->retry_most && a->max_attempts == b->max_attempts &&
	       a->overflow == b->overflow && a->flags == b->flags &&
	       !strncmp(a->dead_letter, b->dead_letter, sizeof(a->dead_letter));
}

static uint32_t policies_of(const shmq_settings *s)
{
	uint32_t bits = 0;

	if (s->max_messages || s->max_bytes || s->overflow != SHMQ_OVERFLOW_DISK)
		bits |= SHMQ_POLICY_LIMITS;
	if (s->message_ttl)
		bits |= SHMQ_POLICY_EXPIRY;
	if (s->max_attempts || s->retry_first)
		bits |= SHMQ_POLICY_FAILURES;
	if (s->max_bytes)
		bits |= SHMQ_POLICY_BYTES;
	if (s->overflow != SHMQ_OVERFLOW_DISK)
		bits |= SHMQ_POLICY_MEMORY;
	if (s->flags & SHMQ_SEALED_ONLY)
		bits |= SHMQ_POLICY_SEALED;
	return bits;
}

/* Write the copy that does not hold, then turn the word. */
static void store(shmq_settings_desc *two, _Atomic uint32_t *policy, const shmq_settings *s)
{
	uint32_t next = ~ld(policy) & SHMQ_POLICY_SECOND;
	shmq_settings_desc *to = &two[next];

	memset(to, 0, sizeof(*to));
	to->max_messages = s->max_messages;
	to->max_bytes = s->max_bytes;
	to->message_ttl = s->message_ttl;
	to->retry_first = s->retry_first;
	to->retry_most = s->retry_most;
	to->max_attempts = s->max_attempts;
	to->overflow = s->overflow;
	to->flags = s->flags;
	memcpy(to->dead_letter, s->dead_letter, strnlen(s->dead_letter, SHMQ_NAME - 1));
	SHMQ_KILLPOINT("configure.fields");
	st_release(policy, next | policies_of(s)); /* SYNC(policy) */
}

static shmq_settings load(const shmq_settings_desc *two, _Atomic uint32_t *policy)
{
	const shmq_settings_desc
			*from = &two[ld_acquire(policy) & SHMQ_POLICY_SECOND]; /* SYNC(policy) */
	shmq_settings s = {.max_messages = from->max_messages,
	                   .max_bytes = from->max_bytes,
	                   .message_ttl = from->message_ttl,
	                   .retry_first = from->retry_first,
	                   .retry_most = from->retry_most,
	                   .max_attempts = from->max_attempts,
	                   .overflow = from->overflow,
	                   .flags = from->flags};

	memcpy(s.dead_letter, from->dead_letter, strnlen(from->dead_letter, SHMQ_NAME - 1));
	return s;
}

void settings_store(shmq_queue_desc *q, const shmq_settings *s)
{
	store(q->settings, &q->policy, s);
}

shmq_settings settings_load(shmq_queue_desc *q)
{
	return load(q->settings, &q->policy);
}

void topic_settings_store(shmq_topic_desc *t, const shmq_settings *s)
{
	store(t->settings, &t->policy, s);
}

shmq_settings topic_settings_load(shmq_topic_desc *t)
{
	return load(t->settings, &t->policy);
}
