//! The classes of characters that the split pattern speaks of, as one byte of flags a character.

use std::sync::LazyLock;

use regex_syntax::hir::Class;
use regex_syntax::hir::HirKind;

/// Script Han, whatever the category.
pub(super) const HAN: u8 = 1;
/// Any letter.
pub(super) const LETTER: u8 = 1 << 1;
/// Any number.
pub(super) const NUMBER: u8 = 1 << 2;
/// May stand in the upper part of a word; never Han.
pub(super) const UPPER: u8 = 1 << 3;
/// May stand in the lower part of a word; never Han. Marks and caseless letters are both.
pub(super) const LOWER: u8 = 1 << 4;
/// White space as the pattern's `\s` means it, which leaves out U+001C to U+001F.
pub(super) const SPACE: u8 = 1 << 5;
/// Carriage return or line feed.
pub(super) const NEWLINE: u8 = 1 << 6;

/// The pattern's own classes, word for word, so that they mean here what they mean there.
const CLASSES: [(&str, u8); 7] = [
    (r"[\p{Han}]", HAN),
    (r"[\p{L}]", LETTER),
    (r"[\p{N}]", NUMBER),
    (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", UPPER),
    (r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", LOWER),
    (r"[\s]", SPACE),
    (r"[\r\n]", NEWLINE),
];

const PAGE: usize = 256;
const PAGES: usize = 0x11_0000 / PAGE;

/// Pages of 256 characters, equal ones shared: about 70 kB for all of Unicode.
struct Table {
    page_of: Vec<u16>,
    pages: Vec<[u8; PAGE]>,
}

static TABLE: LazyLock<Table> = LazyLock::new(Table::build);

/// The flags of a character.
pub(super) fn class_of(c: char) -> u8 {
    let c = c as usize;
    TABLE.pages[usize::from(TABLE.page_of[c / PAGE])][c % PAGE]
}

impl Table {
    fn build() -> Table {
        let mut flags = vec![0u8; PAGES * PAGE];
        for (pattern, flag) in CLASSES {
            let hir = regex_syntax::parse(pattern).expect("the pattern is a constant of this file");
            let HirKind::Class(Class::Unicode(class)) = hir.kind() else {
                unreachable!("{pattern} names more than one character, all of Unicode")
            };
            for range in class.iter() {
                for flags in &mut flags[range.start() as usize..=range.end() as usize] {
                    *flags |= flag;
                }
            }
        }
        let mut pages: Vec<[u8; PAGE]> = Vec::new();
        let page_of = flags
            .chunks_exact(PAGE)
            .map(|page| {
                let number = pages.iter().position(|p| p == page).unwrap_or_else(|| {
                    let mut new = [0; PAGE];
                    new.copy_from_slice(page);
                    pages.push(new);
                    pages.len() - 1
                });
                u16::try_from(number).expect("there are 4,352 pages in all")
            })
            .collect();
        Table { page_of, pages }
    }
}
