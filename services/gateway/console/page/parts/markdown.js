/**
 * Reads the little Markdown that answers need: paragraphs, headings, lists, code, tables, quotes, rules and emphasis.
 *
 * Everything else, links, images and HTML among it, stays the text that it is.
 */

/** @typedef {{kind: "text" | "code" | "strong" | "emphasis" | "deleted", text: string}} Span */
/** @typedef {{depth: number, ordered: boolean, number: number, text: string}} Item */
/**
 * @typedef {{begin: number} & (
 *   {kind: "paragraph" | "quote", text: string}
 *   | {kind: "heading", level: number, text: string}
 *   | {kind: "code", language: string, text: string}
 *   | {kind: "list", items: Item[]}
 *   | {kind: "table", head: string[], rows: string[][]}
 *   | {kind: "rule"}
 * )} Block
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const EMPHASIS = [
  { mark: "**", kind: "strong" },
  { mark: "__", kind: "strong" },
  { mark: "~~", kind: "deleted" },
  { mark: "*", kind: "emphasis" },
  { mark: "_", kind: "emphasis" },
];

/**
 * Returns the blocks of a text. Text that is added behind changes no block before the last one that begins ahead of
 * the last two lines.
 *
 * @param {string} text
 * @returns {Block[]}
 */
export function blocks(text) {
  /** @type {Block[]} */
  const result = [];
  let begin = 0;
  let blank = true;
  /** The fence that ends the open code block; empty outside of one. */
  let fence = "";
  for (const line of text.split("\n")) {
    const last = result.at(-1);
    if (fence && last?.kind === "code") {
      if (line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "")) fence = "";
      else last.text += `${line}\n`;
    } else {
      fence = add(result, line, begin, blank);
      blank = !line.trim();
    }
    begin += line.length + 1;
  }
  return result;
}

/**
 * Adds a line to the last block, or begins another one; returns the fence that ends it, if it is code.
 *
 * @param {Block[]} result
 * @param {string} line
 * @param {number} begin
 * @param {boolean} blank Whether the line before is blank.
 */
function add(result, line, begin, blank) {
  const last = result.at(-1);
  const fence = FENCE.exec(line);
  if (fence) {
    result.push({ kind: "code", language: fence[2], text: "", begin });
    return fence[1];
  }
  const heading = HEADING.exec(line);
  const item = ITEM.exec(line);
  const quote = QUOTE.exec(line);
  if (!line.trim()) return "";
  if (heading) {
    result.push({ kind: "heading", level: heading[1].length, text: heading[2], begin });
  } else if (RULE.test(line)) {
    result.push({ kind: "rule", begin });
  } else if (item) {
    const [, indent, , number, text] = item;
    const entry = { depth: indent.length, ordered: number !== undefined, number: Number(number ?? 0), text };
    if (last?.kind === "list") last.items.push(entry);
    else result.push({ kind: "list", items: [entry], begin });
  } else if (quote) {
    if (last?.kind === "quote" && !blank) last.text += `\n${quote[1]}`;
    else result.push({ kind: "quote", text: quote[1], begin });
  } else if (last?.kind === "list" && (!blank || /^\s{2,}/.test(line))) {
    last.items[last.items.length - 1].text += `\n${line.trim()}`;
  } else if (last?.kind === "table" && !blank && line.includes("|")) {
    last.rows.push(cells(line));
  } else if (last?.kind === "paragraph" && !blank && last.text) {
    const head = last.text.slice(last.text.lastIndexOf("\n") + 1);
    if (TABLE_LINE.test(line) && line.includes("-") && head.includes("|")) {
      last.text = last.text.slice(0, -head.length - 1);
      if (!last.text) result.pop();
      result.push({ kind: "table", head: cells(head), rows: [], begin: begin - head.length - 1 });
    } else {
      last.text += `\n${line}`;
    }
  } else {
    result.push({ kind: "paragraph", text: line, begin });
  }
  return "";
}

/** @param {string} line */
function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

/**
 * Returns the spans of a text.
 *
 * @param {string} text
 * @returns {Span[]}
 */
export function spans(text) {
  /** @type {Span[]} */
  const result = [];
  let plain = "";
  /** @param {Span} span @param {number} next */
  const take = (span, next) => {
    if (plain) result.push({ kind: "text", text: plain });
    plain = "";
    result.push(span);
    return next;
  };
  for (let at = 0; at < text.length; ) {
    const code = text[at] === "`" ? /^(`+)(.+?)\1(?!`)/s.exec(text.slice(at, at + 2000)) : null;
    const emphasis = code ? null : emphasisAt(text, at);
    if (code) {
      at = take({ kind: "code", text: code[2] }, at + code[0].length);
    } else if (emphasis) {
      at = take(emphasis.span, emphasis.end);
    } else {
      const escaped = text[at] === "\\" && "\\`*_~#|-".includes(text[at + 1] ?? " ");
      plain += text[escaped ? at + 1 : at];
      at += escaped ? 2 : 1;
    }
  }
  if (plain) result.push({ kind: "text", text: plain });
  return result;
}

/**
 * Returns the emphasis that begins at a position, and its end.
 *
 * @param {string} text
 * @param {number} at
 * @returns {{span: Span, end: number} | null}
 */
function emphasisAt(text, at) {
  if (!"*_~".includes(text[at])) return null;
  for (const { mark, kind } of EMPHASIS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    const end = text.indexOf(mark, from + 1);
    const word = mark[0] === "_" && (/\w/.test(text[at - 1] ?? "") || /\w/.test(text[end + mark.length] ?? ""));
    if (end < 0 || end - from > 2000 || word || /^\s|\s$/.test(text.slice(from, end))) continue;
    return { span: { kind: /** @type {Span["kind"]} */ (kind), text: text.slice(from, end) }, end: end + mark.length };
  }
  return null;
}
