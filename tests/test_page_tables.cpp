// Pages of the key/value cache: shared prefixes, and no page with two owners that write to it.
#include "generation/page_tables.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

TEST(PageTables, SequencesShareThePagesOfAPrefix) {
  PageTables pages(5, 3);
  pages.grow(0, 2 * kPage + 1);
  EXPECT_EQ(pages.of(0), (PageTables::Table{0, 1, 2}));
  pages.grow(0, 2 * kPage + 2);  // still in the third page
  EXPECT_EQ(pages.free(), 2);

  pages.share(1, {0, 1, 2});
  EXPECT_EQ(pages.free(), 2) << "no page more";
  EXPECT_EQ(pages.replace_last(1), 2);
  EXPECT_EQ(pages.of(1), (PageTables::Table{0, 1, 3}));
  EXPECT_TRUE(pages.is_shared(1) && !pages.is_shared(2) && !pages.is_shared(3));

  pages.release(0);
  EXPECT_EQ(pages.free(), 2) << "the third page and the one that nobody took";
  pages.share(1, {0, 1});  // a sequence that starts again with a part of its own prefix
  EXPECT_EQ(pages.of(1), (PageTables::Table{0, 1}));
  EXPECT_FALSE(pages.is_shared(0));
  pages.release(1);
  EXPECT_EQ(pages.free(), 5);
}

TEST(PageTables, TellWhenATableChanges) {
  PageTables pages(3, 2);
  EXPECT_TRUE(pages.changed()) << "nothing is known yet";
  EXPECT_FALSE(pages.changed());
  pages.grow(0, 1);
  EXPECT_TRUE(pages.changed());
  pages.grow(0, kPage);
  EXPECT_FALSE(pages.changed());
  pages.share(1, pages.of(0));
  EXPECT_TRUE(pages.changed());
  pages.replace_last(1);
  EXPECT_TRUE(pages.changed());
  pages.release(1);
  EXPECT_TRUE(pages.changed());
}

TEST(PageTables, RefuseMorePagesThanThereAre) {
  PageTables pages(3, 2);
  pages.grow(0, 2 * kPage);
  EXPECT_ERROR(pages.grow(1, kPage + 1), "1 free pages, and a sequence needs 2");
  EXPECT_EQ(pages.free(), 1);
}

}  // namespace
}  // namespace streambp
