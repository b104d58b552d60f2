#include "memory/properties.h"

#include "base/bounds.h"
#include "base/status.h"

#include <string.h>

static const char internal[] = "shmq-";

static bool character_ok(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
}

/* Returns true if it is a name, reserved or not. */
static bool property_name_ok(const shmq_property *p)
{
	if (!p->name_length || p->name_length > SHMQ_PROPERTY_NAME)
		return false;
	for (uint32_t i = 0; i < p->name_length; i++)
		if (!character_ok(p->name[i]))
			return false;
	return true;
}

bool property_is_internal(const shmq_property *p)
{
	return p->name_length >= sizeof(internal) - 1 &&
	       !memcmp(p->name, internal, sizeof(internal) - 1);
}

int shmq_property_next(const void *block, uint64_t length, uint64_t *at, shmq_property *out)
{
	const uint8_t *bytes = block;
	uint64_t left = length - *at, name, value;

	if (*at >= length)
		return 0;
	name = bytes[*at];
	if (!TRUST_CHECK(left >= PROPERTY_HEAD + name))
		return -1;
	value = bytes[*at + 1 + name] | (uint64_t)bytes[*at + 2 + name] << 8;
	if (!TRUST_CHECK(left - PROPERTY_HEAD - name >= value))
		return -1;
	*out = (shmq_property){.name = (const char *)bytes + *at + 1,
	                       .name_length = (uint32_t)name,
	                       .value = bytes + *at + PROPERTY_HEAD + name,
	                       .length = (uint32_t)value};
	if (!property_name_ok(out))
		return -1;
	*at += PROPERTY_HEAD + name + value;
	return 1;
}

uint8_t *property_write(uint8_t *to, const shmq_property *p)
{
	*to++ = (uint8_t)p->name_length;
	memcpy(to, p->name, p->name_length);
	to += p->name_length;
	*to++ = (uint8_t)p->length;
	*to++ = (uint8_t)(p->length >> 8);
	if (p->length)
		memcpy(to, p->value, p->length);
	return to + p->length;
}

int shmq_property_check(const shmq_property *p)
{
	int shown = p->name_length > SHMQ_PROPERTY_NAME ? (int)SHMQ_PROPERTY_NAME : (int)p->name_length;

	if (!property_name_ok(p))
		return fail(SHMQ_INVALID,
		            "a property's name has 1 to %u of the characters a-z 0-9 . _ -, unlike '%.*s'",
		            SHMQ_PROPERTY_NAME, shown, p->name);
	if (property_is_internal(p))
		return fail(SHMQ_INVALID,
		            "the property '%.*s': names that begin with '%s' are reserved; choose another",
		            shown, p->name, internal);
	return 0;
}

int shmq_property_add(void *block, uint64_t *length, const shmq_property *p)
{
	uint64_t size = (uint64_t)PROPERTY_HEAD + p->name_length + p->length;
	int r = shmq_property_check(p);

	if (r)
		return r;
	if (*length > SHMQ_PROPERTIES_MOST || size > SHMQ_PROPERTIES_MOST - *length)
		return fail(SHMQ_TOO_BIG,
		            "with the property '%.*s' (%u bytes) the properties have more than %u bytes; "
		            "put long values into the body",
		            (int)p->name_length, p->name, p->length, SHMQ_PROPERTIES_MOST);
	property_write((uint8_t *)block + *length, p);
	*length += size;
	return 0;
}

int shmq_properties_check(const void *block, uint64_t length)
{
	shmq_property p;
	uint64_t at = 0;
	int r;

	if (length > SHMQ_PROPERTIES_MOST)
		return fail(SHMQ_TOO_BIG,
		            "the properties have %llu bytes; at most %u: put long values into the body",
		            (unsigned long long)length, SHMQ_PROPERTIES_MOST);
	while ((r = shmq_property_next(block, length, &at, &p)) > 0)
		if ((r = shmq_property_check(&p)))
			return r;
	return r ? fail(SHMQ_INVALID, "the properties are no whole entries at byte %llu",
	                (unsigned long long)at)
	         : 0;
}

int properties_check_all(const shmq_body *blocks, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		int r = blocks[i].length ? shmq_properties_check(blocks[i].data, blocks[i].length) : 0;

		if (r)
			return r;
	}
	return 0;
}
