#include "operations.h"

#include <string.h>

static const operations *const all[] = {
	&publish_operations,    &consume_operations, &lanes_operations, &lease_operations,
	&spill_operations,      &chunk_operations,   &topic_operations, &client_operations,
	&supervisor_operations, &dead_operations,    &store_operations, &limit_operations};
#define TABLES (sizeof(all) / sizeof(all[0]))

uint32_t operation_count(void)
{
	uint32_t n = 0;

	for (size_t i = 0; i < TABLES; i++)
		n += all[i]->count;
	return n;
}

const operation *operation_at(uint32_t i)
{
	size_t t = 0;

	while (i >= all[t]->count)
		i -= all[t++]->count;
	return &all[t]->table[i];
}

const operation *operation_named(const char *name)
{
	for (uint32_t i = 0, n = operation_count(); i < n; i++)
		if (!strcmp(operation_at(i)->name, name))
			return operation_at(i);
	return NULL;
}
