// Prints JSON schemas that zod makes of random types, one a line: `node zod_schemas.mjs COUNT SEED`, beside node_modules/zod.
import { z } from "zod";

const [count, seed] = process.argv.slice(2).map(Number);
let state = seed;
const random = () => (state = (state * 1103515245 + 12345) % 2147483648) / 2147483648;
const below = (limit) => Math.floor(random() * limit);
const choose = (values) => values[below(values.length)];
const names = ["id", "name", "kind", "tags", "price", "created_at", "user", "items", "a-b", "größe", "$ref", "notes"];
const some = (most) => [...names].sort(() => random() - 0.5).slice(0, 1 + below(most));

const texts = [
  () => z.string(),
  () => z.string().min(below(4)).max(4 + below(20)),
  () => z.string().length(1 + below(8)),
  () => z.string().regex(choose([/^[A-Z]{3}-\d{2,4}$/, /^\w+$/, /[a-z]+/, /^(a|b)*$/])),
  () => z.string().startsWith("x-"),
  () => z.string().endsWith(".txt"),
  () => z.string().includes("/"),
  () => z.string().uppercase(),
  () => z.string().lowercase(),
  () => z.string().nonempty(),
  () => z.email(),
  () => z.url(),
  () => z.uuid(),
  () => z.uuidv4(),
  () => z.guid(),
  () => z.emoji(),
  () => z.nanoid(),
  () => z.cuid(),
  () => z.cuid2(),
  () => z.ulid(),
  () => z.ipv4(),
  () => z.ipv6(),
  () => z.cidrv4(),
  () => z.base64(),
  () => z.base64url(),
  () => z.e164(),
  () => z.jwt(),
  () => z.hostname(),
  () => z.hex(),
  () => z.iso.date(),
  () => z.iso.time(),
  () => z.iso.datetime(),
  () => z.iso.datetime({ offset: true }),
  () => z.iso.duration(),
  () => z.templateLiteral(["v", z.number()]),
];
const numbers = [
  () => z.number(),
  () => z.int(),
  () => z.int32(),
  () => z.uint32(),
  () => z.float32(),
  () => z.float64(),
  () => z.number().min(-below(100)).max(below(1000)),
  () => z.number().positive(),
  () => z.number().nonnegative().lt(1),
  () => z.number().multipleOf(choose([5, 0.5, 0.01])),
  () => z.int().min(1).max(10),
  () => z.number().int().gt(0),
  () => z.int().nonnegative(),
];
const others = [
  () => z.boolean(),
  () => z.null(),
  () => z.enum(["red", "green", "blue"].slice(0, 1 + below(3))),
  () => z.literal(choose(["a", 3, true, "größe", 1.5])),
  () => z.literal(["a", 1, null]),
  () => z.any(),
  () => z.unknown(),
];
const atom = () => choose(choose([texts, numbers, others]))();

const shape = (depth, most) => Object.fromEntries(some(most).map((name) => [name, member(depth)]));
const member = (depth) => {
  const type = any(depth);
  return choose([
    () => type,
    () => type,
    () => type.optional(),
    () => type.nullable(),
    () => type.nullish(),
    () => type.describe("What it is"),
    () => type.readonly(),
  ])();
};
const composed = [
  (depth) => z.object(shape(depth, 4)),
  (depth) => z.object(shape(depth, 4)),
  (depth) => z.strictObject(shape(depth, 4)),
  (depth) => z.looseObject(shape(depth, 3)),
  (depth) => z.object(shape(depth, 3)).catchall(atom()),
  (depth) => z.object(shape(depth, 4)).partial(),
  (depth) => z.array(any(depth)),
  (depth) => z.array(any(depth)).min(below(3)).max(3 + below(3)),
  (depth) => z.array(any(depth)).nonempty(),
  (depth) => z.tuple([any(depth), any(depth)]),
  (depth) => z.tuple([any(depth)], any(depth)),
  (depth) => z.record(z.string(), any(depth)),
  (depth) => z.record(z.enum(["x", "y"]), any(depth)),
  (depth) => z.partialRecord(z.enum(["x", "y"]), any(depth)),
  (depth) => z.record(z.string().regex(/^[a-z]+$/), any(depth)),
  (depth) => z.union([any(depth), any(depth)]),
  (depth) =>
    z.discriminatedUnion("type", [
      z.object({ type: z.literal("one"), ...shape(depth, 2) }),
      z.object({ type: z.literal("two"), ...shape(depth, 2) }),
    ]),
  (depth) => z.intersection(z.object({ left: any(depth) }), z.object({ right: any(depth) })),
  (depth) => z.object({ ...shape(depth, 2) }).extend({ more: any(depth) }),
  (depth) => {
    const node = z.object({ value: any(depth), get next() { return node.nullable(); } });
    return node;
  },
];
const any = (depth) => (depth > 0 && random() < 0.55 ? choose(composed)(depth - 1) : atom());

for (let number = 0; number < count; ) {
  const options = choose([{}, { io: "input" }, { target: "draft-7" }, { reused: "ref" }]);
  const type = random() < 0.85 ? z.object(shape(2, 5)) : choose(composed)(2);
  try {
    const schema = z.toJSONSchema(type, options);
    console.log(JSON.stringify({ name: `zod_${number}`, set: "zod", schema }));
    number += 1;
  } catch (error) {
    if (!/cannot be represented/.test(error.message)) throw error;
  }
}
